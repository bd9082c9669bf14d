"""Which part of the model an instruction belongs to, and the source line it comes from: the program's stack frames."""

import re

from app.planning.hlo import Instruction

# (end of the file's path, start of the function's name, part), asked of every frame from the innermost outwards.
PARTS = (
    ("app/ops/gdn", "", "gdn core"),
    ("app/ops/affine_scan.py", "", "gdn core"),
    ("app/ops/conv.py", "", "gdn projections"),
    ("app/ops/zigzag.py", "", "attention projections"),
    ("app/ops/ring_attention.py", "", "attention core"),
    ("app/ops/attention", "", "attention core"),
    ("app/ops/pallas/attention.py", "", "attention core"),
    ("app/ops/pallas/gdn", "", "gdn core"),
    ("app/ops/experts.py", "", "mlp"),
    ("app/models/gdn_mixer.py", "", "gdn projections"),
    ("app/models/attn_mixer.py", "", "attention projections"),
    ("app/models/moe.py", "", "mlp"),
    ("app/models/layers.py", "MLP.", "mlp"),
    ("app/models/layers.py", "RMSNorm.", "norms"),
    ("app/training/loss.py", "", "head and loss"),
    ("app/models/qwen.py", "Qwen.head", "head and loss"),
    ("app/models/qwen.py", "Qwen._embedded", "embedding"),
    ("app/training/optim.py", "", "optimizer"),
    ("app/training/step.py", "Program._train_step", "optimizer"),
)
OTHER = "other"

Frame = tuple[str, str, int, int]  # file, function, line, number of the frame that called


class Sources:
    """The tables FileNames, FunctionNames, FileLocations and StackFrames at the head of a program's text."""

    def __init__(self, text: str):
        head = text[: text.find("\n%")] if "\n%" in text else text
        names = {
            title: dict(re.findall(r'^(\d+) "(.*)"$', _table(head, title), re.MULTILINE))
            for title in ("FileNames", "FunctionNames")
        }
        places = {
            number: (names["FileNames"].get(file, ""), names["FunctionNames"].get(function, ""), int(line))
            for number, file, function, line in re.findall(
                r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)",
                _table(head, "FileLocations"), re.MULTILINE)
        }  # fmt: skip
        # The text counts parents from one, the outermost frame names itself.
        self._frames: dict[int, Frame] = {
            int(number): (*places[place], int(parent) - 1)
            for number, place, parent in re.findall(
                r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)", _table(head, "StackFrames"), re.MULTILINE)
            if place in places
        }  # fmt: skip

    def frames(self, x: Instruction) -> list[Frame]:
        """From the innermost outwards; [] for what the compiler made itself."""
        found = re.search(r"stack_frame_id=(\d+)", x.attributes)
        number, frames = int(found[1]) if found else 0, []
        while number in self._frames:
            frames.append(self._frames[number])
            number = self._frames[number][3]
        return frames

    def part(self, x: Instruction) -> str:
        """One of PARTS' names; OTHER for what the compiler made, copies around loops mostly."""
        if re.search(r'op_name="[^"]*/shard_map"', x.attributes):  # of no operation inside
            return OTHER
        for file, function, _, _ in self.frames(x):
            for end, start, part in PARTS:
                if end in file and function.startswith(start):
                    return part
        return OTHER

    def line(self, x: Instruction) -> str:
        """ "app/models/layers.py:97 MLP.__call__ (dot_general)", "" if unknown."""
        frames = self.frames(x)
        operation = re.search(r'op_name="[^"]*?([^"/]*)"', x.attributes)
        if not frames:
            return ""
        file, function, line, _ = frames[0]
        return f"{file[file.rfind('app/') :]}:{line} {function} ({operation[1] if operation else x.operation})"


def _table(head: str, title: str) -> str:
    found = re.search(rf"^{title}\n(.*?)(?:\n\n|\Z)", head, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""
