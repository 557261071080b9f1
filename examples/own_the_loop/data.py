"""The demo's prompts as text, with their answers, and a reward that is seldom the same for all completions."""

from examples.tiny.task import TinyTask
from lightrl.policy import load_tokenizer
from lightrl.prompts import ground_truth, load_rows


def chat_prompts(task: TinyTask) -> list[tuple[str, str]]:
    """Return (prompt, ground truth) of each training row, the chat template applied."""
    tokenizer = load_tokenizer(task.model_dir)
    rows = load_rows(task.train)
    texts = tokenizer.apply_chat_template([row["prompt"] for row in rows], tokenize=False, add_generation_prompt=True)
    return list(zip(texts, map(ground_truth, rows), strict=True))


def reward(completion: str, ground_truth: str) -> float:
    """Return 1.0 for the right digit alone, 0.5 for one other word alone, else 0.0.

    Example:
        >>> reward("9", "9"), reward("8", "9"), reward("9 9", "9")
        (1.0, 0.5, 0.0)
    """
    words = completion.split()
    return 0.5 * (len(words) == 1) + 0.5 * (words == [ground_truth])
