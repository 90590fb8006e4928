"""A pool of worker processes that tests share: each case runs in a fresh process group on the first `world` workers."""

import faulthandler
import gc
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil
import torch

PRELOAD = ["torch", "torch.distributed", "transformers", "numpy", "pytest", "setuptools"]
HOSTS = [
    "transformers.trainer", "accelerate", "deepspeed", "peft", "datasets", "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer", "networkx", "torch._inductor.compile_fx",
]  # fmt: skip
"""Frameworks, and what torch.compile and DeepSpeed's optimizers import late. Imported once, in the process that workers
are forked from, they cost each worker nothing; what is not installed is passed over."""


@cache
def fork_server(preload: tuple[str, ...] = ()) -> Any:
    """Processes of this context are forks of one that has imported what tests need, and `preload`."""
    context = mp.get_context("forkserver")
    # With a GPU, DeepSpeed's import asks CUDA for devices, and a process that did so cannot be forked.
    context.set_forkserver_preload([*PRELOAD, *([] if torch.cuda.is_available() else HOSTS), *preload])
    return context


class WorkerError(AssertionError):
    """Some ranks raised; `errors[rank]` holds (type name, message, traceback) or None."""

    def __init__(self, errors: list[tuple[str, str, str] | None]) -> None:
        self.errors = errors
        said = [(rank, *error) for rank, error in enumerate(errors) if error]
        text = "\n".join(f"--- rank {rank}: {kind}: {message}\n{trace}" for rank, kind, message, trace in said)
        super().__init__(f"{sum(e is not None for e in errors)} of {len(errors)} ranks failed\n{text}")


def _serve(rank: int, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch.distributed as dist

    torch.set_num_threads(1)
    # What was imported before the fork stays: collections after each case need not look at it.
    gc.freeze()
    pipe.send(None)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            task = None
        if task is None:
            return
        function, world, store, timeout, once, joined, args = task
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
        faulthandler.dump_traceback_later(max(2 * timeout - 5, 1))
        try:
            torch.manual_seed(0)
            if joined:
                meet = {"store": dist.FileStore(store, world), "timeout": timedelta(seconds=timeout)}
                dist.init_process_group("gloo", rank=rank, world_size=world, **meet)
                dist.barrier()  # one that is done at once would leave while others still connect to it
            answer = (True, function(rank, world, *args))
        except BaseException as error:
            answer = (False, (type(error).__name__, str(error), traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
            from deepspeed_cad.session import close_session

            close_session()
            if dist.is_initialized():
                dist.destroy_process_group()
            # Groups have numbers: where one could not be made, the next one would have another here than elsewhere.
            dist.distributed_c10d._world.group_count = 0
        if once:
            pipe.send(answer)
            return
        # Process groups that an error's traceback held would be freed at any later time, and wait for each other.
        gc.collect()
        pipe.send(answer)


class WorkerPool:
    """Workers are started when a case first needs them and replaced when they die."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        """`preload`: further modules to import once."""
        self._preload = tuple(preload)
        self._workers: list[tuple[Any, Connection]] = []

    def _start(self, rank: int) -> tuple[Any, Connection]:
        context = fork_server(self._preload)
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(rank, theirs))
        process.start()
        theirs.close()
        return process, ours

    def run(self, function: Callable, world: int, *args: Any, timeout: float = 60.0, joined: bool = True) -> list[Any]:
        """[function(rank, world, *args) for every rank]; raises WorkerError if any rank raised."""
        errors, results = self.try_run(function, world, *args, timeout=timeout, joined=joined)
        if any(errors):
            raise WorkerError(errors)
        return results

    def try_run(
        self, function: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0, grace: float = 60.0,
        once: bool = False, joined: bool = True, mortal: Collection[int] = (),
    ) -> tuple[list[tuple[str, str, str] | None], list[Any]]:  # fmt: skip
        """Errors and results of every rank; a worker that died has the error ("Died", exit code). `joined`: workers are
        in one process group; else `function` makes its own. `once`: each worker ends after its answer, as the process
        of a script does, and closes its connections. `mortal`: ranks that may die or be stopped, which is no reason to
        hurry the others. Those that are stopped are killed when the others have answered."""
        started = list(range(len(self._workers), world))
        self._workers += [self._start(rank) for rank in started]
        for rank, (process, _) in enumerate(self._workers):
            if not process.is_alive():
                self._workers[rank] = self._start(rank)
                started.append(rank)
        for rank in set(started):
            self._workers[rank][1].recv()  # what it imports is no part of the case's time
        with tempfile.TemporaryDirectory() as folder:
            for _, pipe in self._workers[:world]:
                pipe.send((function, world, os.path.join(folder, "store"), timeout, once, joined, args))
            errors: list[tuple[str, str, str] | None] = [None] * world
            results: list[Any] = [None] * world
            waiting = dict(enumerate(self._workers[:world]))
            deadline = time.monotonic() + timeout * 2
            while waiting:
                left, alone = max(0.0, deadline - time.monotonic()), all(rank in mortal for rank in waiting)
                ready = wait([pipe for _, pipe in waiting.values()], timeout=min(left, 0.2) if alone else left)
                for process, _ in waiting.values():
                    if alone and not ready and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                        process.kill()
                for rank, (process, pipe) in list(waiting.items()):
                    if pipe in ready:
                        del waiting[rank]
                        try:
                            ok, value = pipe.recv()
                        except EOFError:
                            process.join(5)
                            ok, value = False, ("Died", f"exit code {process.exitcode}", "")
                        if ok:
                            results[rank] = value
                        else:
                            errors[rank] = value
                            # The others learn of it by themselves, or hang: that is for the test to see, soon.
                            if rank not in mortal:
                                deadline = min(deadline, time.monotonic() + grace)
                if not ready and time.monotonic() >= deadline:
                    for rank, (process, _) in waiting.items():
                        process.kill()
                        process.join(5)
                        errors[rank] = ("Hung", "gave no answer in time", "")
                    break
            if once:
                for process, _ in self._workers[:world]:
                    process.join(5)
        return errors, results

    def close(self) -> None:
        for process, pipe in self._workers:
            if process.is_alive():
                pipe.send(None)
                process.join(5)
                if process.is_alive():
                    process.kill()
        self._workers.clear()
