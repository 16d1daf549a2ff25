"""The reference elastic trainer: a small GPT that survives being killed, and the demo that kills it.

Flat enough to read aloud: `text` is what it learns, `model` is what learns, `train`
is the loop with save and resume, `stock` reads a checkpoint with nothing but torch,
`demo` is what ``make demo`` runs. Of ckptd it uses only what `ckptd_client` exports.
"""
