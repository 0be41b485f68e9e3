"""The deliberate faults in what is saved and loaded: see ``_mutants.py``."""

from ._mutants import Mutant


OF_DISK: dict[str, Mutant] = {
    "numbers as they lie in memory": Mutant(
        "A tensor that is not row by row in memory is not so in the file.",
        "_base/bytes.py",
        "return (x if x.is_contiguous() else bits(x).contiguous()).cpu()",
        "return torch.as_strided(x, (x.numel(),), (1,)).cpu()",
    ),
    "a checksum that nobody compares": Mutant(
        "Numbers that were changed on the disk are loaded.",
        "checkpoint/save_load.py",
        "if check is not None and check != contents.checks[number]:",
        "if check is None and check == contents.checks[number]:",
    ),
    "parts with holes between them": Mutant(
        "What no rank has written is loaded as it happens to lie in memory.",
        "checkpoint/pieces.py",
        "return cells and sorted(held) == sorted(itertools.product(*sides))",
        "return cells or bool(held)",
    ),
    "shards of two saves": Mutant(
        "A shard may be of any save.",
        "checkpoint/shards.py",
        "if part.save != usual:",
        "if part.save == part:",
    ),
    "one rank goes on without the others": Mutant(
        "A rank that could read its part does not hear that another could not.",
        "checkpoint/shards.py",
        "if worst:",
        "if worst < 0:",
    ),
    "a header of any length": Mutant(
        "As much is read as a file says that its header is long.",
        "checkpoint/file_format.py",
        "if length > LONGEST or 8 + length + 4 > size:",
        "if 8 + length + 4 > size:",
    ),
    "leftovers of one name alone": Mutant(
        "What a killed save of ranks leaves is not removed.",
        "checkpoint/whole_file.py",
        "is_folder = stat.S_ISDIR(os.lstat(leftover).st_mode)",
        "is_folder = False",
    ),
}
