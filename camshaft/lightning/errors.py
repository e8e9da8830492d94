"""Name the errors of Lightning's surface."""

from __future__ import annotations

from camshaft.errors import CamshaftError


class MisconfigurationException(CamshaftError):  # noqa: N818 - the name that users catch
    """Something in the trainer, the module or a callback cannot work as it was asked for."""


class SIGTERMException(SystemExit):  # noqa: N818 - the name that users catch
    """The run was asked to end by a signal; the process ends with 143."""

    def __init__(self) -> None:
        super().__init__(143)
