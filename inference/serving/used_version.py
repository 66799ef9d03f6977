"""The version of a drafter that a server decodes with, and its replacement between requests."""

import asyncio

from inference.adaptation.versions import Version, VersionFolder
from inference.adaptation.weights import ReplaceableWeights, adapted_ends
from inference.drafters.trained.drafter import TrainedDrafter
from inference.serving.engine_thread import LoadedModel
from jakiro.errors import CheckpointError, ConfigError
from jakiro.utils.logs import get_logger

_logger = get_logger(__name__)


class UsedVersion:
    """The version in use, which begins as the newest one that can be used."""

    def __init__(self, model: LoadedModel, drafter: TrainedDrafter, folder: VersionFolder) -> None:
        self.number = 0  # 0 for the drafter's own weights
        self._model, self._folder = model, folder
        self._weights = ReplaceableWeights(drafter.model)
        self._first_fingerprint = model.fingerprint
        for number in reversed(folder.numbers):
            try:
                version = self.read(number)
            except CheckpointError as error:
                _logger.warning("a version cannot be used: %s", error)
                continue
            assert version is not None
            self._weights.use(version.weights)
            model.fingerprint = self._fingerprint(version)
            self.number = number
            return

    def read(self, number: int) -> Version | None:
        """Return a version whose weights fit; None for the drafter's own weights."""
        if number == 0:
            return None
        version = self._folder.read(number)
        self._weights.check(version.weights)
        return version

    async def replace(self, number: int, version: Version | None) -> bool:
        """Use another version from the next request on, and return whether this was possible.

        It is not possible while requests are decoded.
        """
        # No request can start between here and `when_idle`: requests that start later are decoded
        # with the new weights, and have the new fingerprint.
        before, self._model.fingerprint = self._model.fingerprint, self._fingerprint(version)
        weights = None if version is None else version.weights
        done = self._model.engine.when_idle(lambda: self._weights.use(weights))
        is_changed = await asyncio.wrap_future(done)
        if is_changed:
            self.number = number
        else:
            self._model.fingerprint = before
        return is_changed

    def _fingerprint(self, version: Version | None) -> str:
        if version is None:
            return self._first_fingerprint
        return f"{self._first_fingerprint}_{version.digest[:8]}"


def drafter_that_learns(model: LoadedModel) -> TrainedDrafter:
    drafter = model.engine.decoder.drafter
    if type(drafter) is TrainedDrafter and adapted_ends(drafter.model):
        return drafter
    raise ConfigError(
        "only a trained drafter with attention or experts learns with --adapt",
        got=repr(drafter),
    )
