"""The command line: a second front door to the same rooms, one file per command group.

Promises: what a command prints on stdout is either for people or, with
``--json``, one document; every failure is one line on stderr and an exit status
that `ckptd.errors` defines. Never shows a traceback unless asked to.
"""
