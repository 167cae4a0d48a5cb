"""Devices of worker processes: `devices` of the configuration, for models without a device of their own.

The processes are started in engine.py.
"""

from imagemill.config import Config
from imagemill.domain.encoder_settings import ModelSettings


def devices_in_use(config: Config, settings: ModelSettings) -> list[str]:
    """Return the device of each worker of a model; a model with a `device` of its own has one worker.

    Raises:
        WrongUsage: if a configured device does not exist.
    """
    if config.devices is None or settings.device != "auto":
        return [settings.device]
    from imagemill.encoders.loading import chosen_devices, existing_devices

    return chosen_devices(config.devices, existing_devices())
