"""Errors of the embedded services. Their text is what the person at the terminal reads."""


class EmbeddedError(Exception):
    """The embedded services cannot do what was asked; the message says why and what to do."""


class PortTaken(EmbeddedError):
    """A port that the user named is held by another process."""


class ServiceFailed(EmbeddedError):
    """A service ended, or did not become healthy in time."""


class StopFailed(EmbeddedError):
    """Processes survived SIGKILL."""


class RunFailed(EmbeddedError):
    """The Dag run did not succeed, or its results cannot be shown."""
