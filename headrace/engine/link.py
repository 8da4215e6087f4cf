"""What both ends of the link between the API process and the engine process agree on, apart from the messages.

stdin of the child    one line of JSON, the Job
life pipe             the child writes beats; its end of file tells the parent that the child is gone
socket pair           messages.ToEngine down, messages.FromEngine up, as msgpack in frames (`engine.frames`); its end of
                      file tells the child that the parent is gone
"""

from dataclasses import replace

import msgspec

from headrace.base.config import Config

BEAT_BYTES = 8  # one beat: for how many ns the step that is running has been running, little-endian; 0 between steps


class Job(msgspec.Struct, frozen=True):
    """What an engine process is told to run."""

    config: Config
    model_path: str
    epoch: int
    beat_s: float  # between two beats

    def line(self) -> bytes:
        """As the child reads it. Keys and templates are of no use to an engine."""
        config = replace(self.config, api_key="", chat_template="")
        return msgspec.json.encode(msgspec.structs.replace(self, config=config)) + b"\n"
