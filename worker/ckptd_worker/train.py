"""The training loop, with save and resume: ``torchrun … -m ckptd_worker.train --run-name RUN --steps N --save-every K``.

Also runs alone, as ``python -m ckptd_worker.train``. It promises that

- it goes on from ``RUN/latest`` whatever the number of workers was and is now: they share
  one global batch per step, which depends on the step alone;
- it starts afresh only if the daemons of all workers say that the run has no checkpoint. A daemon
  or a store that does not answer is an error, never "no checkpoint"; if only some know of one, or
  of different ones, all look again;
- it exits 0 only if every checkpoint that it saved (or, with nothing left to do, resumed from)
  has become durable.

It never touches files of checkpoints, and uses only what `ckptd_client` and torch export.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ckptd_client import (
    DaemonStorageReader,
    DaemonStorageWriter,
    LeaseLost,
    NotFound,
    Unavailable,
    WrongPhase,
    daemon_address,
    introduce,
    wait,
)
from ckptd_worker.model import GPT
from ckptd_worker.text import VOCABULARY, corpus, global_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: How often to look for a checkpoint, or to load it, while nodes come and go; and the pause between two tries.
TRIES = 6
PAUSE_SECONDS = 2.0
#: What another try may mend: ranks that found different checkpoints, one that was saved again or lost a holder meanwhile.
PASSING = (WrongPhase, LeaseLost, NotFound, Unavailable)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="ckptd_worker.train", description=(__doc__ or "").partition("\n")[0])
    # torchrun takes a --run among its script's arguments for an abbreviation of its own --run-path, and refuses it.
    parser.add_argument(
        "--run-name", "--run", dest="run", default="gpt", help="the run whose latest checkpoint to go on from, and to save to (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=200, help="train until this step (%(default)s)")
    parser.add_argument("--save-every", type=int, default=20, help="steps from one checkpoint to the next; the last step is always saved")
    parser.add_argument("--batch-size", type=int, default=12, help="sequences per step, of all workers together (%(default)s)")
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence (%(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the model (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (%(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="of attention, per layer (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the text (%(default)s)")
    parser.add_argument("--keep-going", action="store_true", help="train on when a save fails; the exit status still tells")
    parser.add_argument("--wait-timeout", type=float, default=600.0, metavar="S", help="seconds at the end for durability (%(default)s)")
    return parser.parse_args(argv)


def say(text: str) -> None:
    """One line on standard output, from rank 0 only."""
    if dist.get_rank() == 0:
        print(f"[train] {text}", flush=True)


def complain(text: str) -> None:
    """One line on standard error, from every rank: what fails may differ from rank to rank."""
    print(f"[train] rank {dist.get_rank()}: {text}", file=sys.stderr, flush=True)


def join() -> torch.device:
    """Joins the process group that torchrun's environment describes, or one of this process alone."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    on_gpu = dist.is_nccl_available() and torch.cuda.is_available() and torch.cuda.device_count() >= local_world
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    return device


def trained_state(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """What a checkpoint holds: the same names at every world size."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step, "world_size": dist.get_world_size()}


def reasons(error: CheckpointException) -> str:
    """What went wrong on the ranks, each cause once, on one line."""
    causes = (cause for cause, _ in error.failures.values())
    return "; ".join(dict.fromkeys(f"{type(cause).__name__}: {cause}" for cause in causes))


def on_all_ranks(call: Callable[[], str]) -> tuple[list[str], tuple[str, int] | None]:
    """What a call gives on each rank; and if it fails anywhere why, with the exit status to end with, which is the CLI's."""
    answer: tuple[str, tuple[str, int] | None]
    try:
        answer = call(), None
    except Exception as error:  # noqa: BLE001 - all ranks have to hear of it: they would wait otherwise
        answer = "", (f"{type(error).__name__}: {error}", getattr(error, "exit_status", 1))
    answers = [answer] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    return [value for value, _ in answers], next((failure for _, failure in answers if failure is not None), None)


def look_for_checkpoint(run: str) -> tuple[str, int]:
    """Whether `run` has a checkpoint, the same on all ranks: "found", "none", or why that is not known.

    With it comes the exit status to end with in that last case.
    """

    def meet() -> str:
        introduce(addresses)
        return ""

    def look() -> str:
        try:
            DaemonStorageReader(f"{run}/latest").read_metadata()
        except NotFound:
            return "none"
        except Unavailable as error:
            return f"{type(error).__name__}: {error}"
        return "found"

    addresses, failure = on_all_ranks(daemon_address)
    _, failure = on_all_ranks(meet) if failure is None else ([], failure)
    answers: set[str] = set()
    for _ in range(TRIES):
        some, failure = on_all_ranks(look) if failure is None else ([], failure)
        if failure is not None:
            return failure
        answers = set(some)
        if answers in ({"found"}, {"none"}):
            return some[0], 0
        time.sleep(PAUSE_SECONDS)
    away = answers - {"found", "none"}
    return min(away, default="the daemons of some workers know of a checkpoint, and those of others do not: give them --peer"), 3


def resume(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, run: str) -> int:
    """Loads the run's latest checkpoint into model and optimizer, in place; returns its step.

    Raises CheckpointException.
    """
    began = time.perf_counter()
    state = trained_state(model, optimizer, 0)
    dcp_load(state, storage_reader=DaemonStorageReader(f"{run}/latest"))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    step = int(state["step"])
    seconds = time.perf_counter() - began
    say(f"resumed {run}/step-{step} saved by {state['world_size']} workers, at {dist.get_world_size()} workers, in {seconds:.2f} s")
    return step


def save(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, run: str, step: int) -> str:
    """Saves and returns the checkpoint's id once the daemon has accepted it. Raises CheckpointException."""
    began = time.perf_counter()
    name = f"{run}/step-{step}"
    dcp_save(trained_state(model, optimizer, step), storage_writer=DaemonStorageWriter(name))
    say(f"saved {name} in {time.perf_counter() - began:.2f} s")
    return name


def train_step(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    """One update from the global batch, of which this rank computes its share; returns the mean loss, 0-dim.

    Every rank takes every world-th sequence. Shares may differ by one, or be empty: losses are
    summed and scaled so that DDP's average over ranks is the mean over the global batch.
    """
    world = dist.get_world_size()
    share = batch[dist.get_rank() :: world].to(next(model.parameters()).device)
    logits = model(share[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), share[:, 1:].flatten(), reduction="sum")
    loss = loss / (batch.shape[0] * (batch.shape[1] - 1))
    optimizer.zero_grad()
    torch.autograd.backward(loss * world)
    optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)
    return total


def wait_for_all(saved: Sequence[str], timeout: float) -> bool:
    """Waits, `timeout` seconds in total, until all that was saved is durable; says what is not, on every rank."""
    began = time.monotonic()
    durable = True
    for name in saved:
        try:
            wait(name, timeout=max(began + timeout - time.monotonic(), 1.0))
        except Exception as error:  # noqa: BLE001 - reported, and the exit status tells
            complain(f"{name} is not durable: {type(error).__name__}: {error}")
            durable = False
    if saved and durable:
        say(f"{saved[-1]} is durable, after {time.monotonic() - began:.2f} s")
    return durable


def train(options: argparse.Namespace) -> int:
    """Resumes, trains, saves, waits; returns the exit status."""
    device = join()
    torch.manual_seed(options.seed)
    gpt = GPT(vocabulary=VOCABULARY, length=options.length, width=options.width, layers=options.layers, heads=options.heads)
    model = DistributedDataParallel(gpt.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    text = corpus()

    first = 0
    found, status = look_for_checkpoint(options.run)
    if found == "none":
        say(f"run {options.run} has no checkpoint: starting afresh at {dist.get_world_size()} workers")
    elif found == "found":
        for tries_left in reversed(range(TRIES)):
            try:
                first = resume(model, optimizer, options.run)
                break
            except CheckpointException as error:
                if not tries_left or not all(isinstance(cause, PASSING) for cause, _ in error.failures.values()):
                    complain(f"cannot resume {options.run}: {reasons(error)}")
                    return 1
                say(f"looking for {options.run}/latest again: {reasons(error)}")
                time.sleep(PAUSE_SECONDS)
    else:
        complain(f"cannot tell whether run {options.run} has a checkpoint, so not starting: {found}")
        return status

    saved: list[str] = []
    failed = 0
    for step in range(first, options.steps):
        began = time.perf_counter()
        batch = global_batch(text, seed=options.seed, step=step, sequences=options.batch_size, length=options.length)
        loss = train_step(model, optimizer, batch).item()
        say(f"step {step + 1} loss {loss:.4f} ({time.perf_counter() - began:.2f} s)")
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            try:
                saved.append(save(model, optimizer, options.run, step + 1))
            except CheckpointException as error:
                complain(f"step {step + 1} was not saved: {reasons(error)}")
                failed += 1
                if not options.keep_going:
                    break

    if not saved and first > 0:  # with nothing left to do, what it would go on from counts
        saved = [f"{options.run}/step-{first}"]
    durable = wait_for_all(saved, options.wait_timeout)
    return 0 if durable and not failed else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the trainer; returns the exit status."""
    options = parse(argv)
    try:
        return train(options)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
