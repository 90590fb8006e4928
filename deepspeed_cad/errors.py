"""Every error that this package raises on purpose, all below one base class.

Each says what was found, what was expected, where (rank, key, document) and what to do.
"""


class CADError(RuntimeError):
    """Base of all errors of deepspeed_cad."""


class CADConfigError(CADError, ValueError):
    """A key or value of the "cad" block is not allowed."""


class CADUnsupportedError(CADError):
    """A model, or a feature of the host framework, that CAD cannot reproduce exactly and therefore refuses."""


class CADDataError(CADError):
    """A micro-batch that cannot be read as packed documents: NaN, negative or contradictory positions."""


class CADPeerError(CADError):
    """Another rank died, did not answer in time, or holds another config, version or plan."""


class ServerLostError(CADPeerError):
    """A reserved server is lost in an exchange and the others go on without it. No training script meets this error."""


def why_ended(error: BaseException | None) -> str:
    """Why a process or a session ends that `error` went through; empty where it ends well."""
    if isinstance(error, SystemExit):
        return f"exit code {error.code}" if error.code else ""
    return "" if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")


def in_one_line(error: BaseException) -> str:
    """The first line of what an error says, and NCCL's own words, which torch puts last."""
    text, _, said = str(error).strip().partition("Last error:\n")
    lines = [one.strip() for one in (*text.splitlines()[:1], *said.splitlines()[:1])]
    return ": ".join(one[:300] for one in lines if one) or type(error).__name__
