"""Draws docs/data_flow.svg from the text below: ``python scripts/data_flow.py [FILE]``."""

import sys
from pathlib import Path

# name, column, row, owner: title / what / part of the API
BOXES = """
prompts    0 0 data:     Prompts        / text or chats, in an order     / train_prompts, curriculum
generate   1 0 strategy: Generate       / token ids, logprobs, version   / strategy.generate
reward     2 0 data:     Reward         / functions or an environment    / reward, environment
score      3 0 module:   Score          / old, reference, value          / RLModule.score
advantages 3 1 module:   Advantages     / rewards against their baseline / RLModule.advantages
pack       2 1 data:     Pack           / micro-batches by tokens        / max_tokens_per_micro_batch
train      1 1 module:   Loss and step  / one optimizer step a batch     / RLModule.loss
watch      0 1 callback: Log, save      / metrics, samples, checkpoints  / lightrl.callbacks
"""
# from, to: what goes there
ARROWS = """
prompts generate:
generate reward:
reward score:
score advantages:
advantages pack:
pack train:
train watch:
train generate: new weights
"""
OWNERS = {"data": "datamodule", "strategy": "strategy", "module": "module", "callback": "callbacks"}
# Light boxes with dark text, grey lines: readable on a light page and on a dark one.
FILLS = {"data": "#cfe3fb", "strategy": "#d5efd3", "module": "#fde3c4", "callback": "#e6dcf7"}
WIDTH, HEIGHT, GAP_X, GAP_Y, TOP = 208, 84, 36, 64, 36
LINE = "#7f868e"

Box = tuple[int, int, str, list[str]]


def parse(text: str) -> dict[str, Box]:
    boxes: dict[str, Box] = {}
    for line in text.strip().splitlines():
        head, words = line.split(":")
        name, column, row, owner = head.split()
        boxes[name] = int(column), int(row), owner, [part.strip() for part in words.split("/")]
    return boxes


def corner(box: Box) -> tuple[int, int]:
    return box[0] * (WIDTH + GAP_X) + 1, TOP + box[1] * (HEIGHT + GAP_Y)


def draw_box(box: Box) -> str:
    x, y = corner(box)
    styles = ['font-size="16" font-weight="600"', 'font-size="13"', 'font-size="12" font-family="monospace"']
    lines = [f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{FILLS[box[2]]}" stroke="{LINE}"/>']
    for words, style, below in zip(box[3], styles, (26, 48, 69), strict=True):
        lines.append(f'<text x="{x + WIDTH // 2}" y="{y + below}" text-anchor="middle" {style}>{words}</text>')
    return "\n".join(lines)


def draw_arrow(start: Box, end: Box, label: str) -> str:
    (x1, y1), (x2, y2) = corner(start), corner(end)
    if start[1] == end[1]:  # beside each other
        right = x2 > x1
        ends = x1 + WIDTH * right, y1 + HEIGHT // 2, x2 + WIDTH * (not right), y2 + HEIGHT // 2
    else:
        down = y2 > y1
        ends = x1 + WIDTH // 2, y1 + HEIGHT * down, x2 + WIDTH // 2, y2 + HEIGHT * (not down)
    line = '<line x1="{}" y1="{}" x2="{}" y2="{}" stroke="{line}" stroke-width="2" marker-end="url(#head)"/>'
    words = f'<text x="{ends[0] + 12}" y="{(ends[1] + ends[3]) // 2 + 5}" font-size="13" fill="{LINE}">{label}</text>'
    return line.format(*ends, line=LINE) + (words if label else "")


def draw_legend() -> str:
    parts = []
    for i, (owner, words) in enumerate(OWNERS.items()):
        x = 1 + i * 120
        parts.append(f'<rect x="{x}" y="6" width="14" height="14" rx="3" fill="{FILLS[owner]}" stroke="{LINE}"/>')
        parts.append(f'<text x="{x + 20}" y="18" font-size="13" fill="{LINE}">{words}</text>')
    return "\n".join(parts)


def draw() -> str:
    boxes = parse(BOXES)
    arrows = [(line.split(":")[0].split(), line.split(":")[1].strip()) for line in ARROWS.strip().splitlines()]
    columns, rows = (1 + max(box[i] for box in boxes.values()) for i in (0, 1))
    width, height = columns * (WIDTH + GAP_X) - GAP_X + 2, TOP + rows * (HEIGHT + GAP_Y) - GAP_Y + 2
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" '
        f'fill="#1c2126" role="img">\n<title>From prompts to new weights, and back</title>\n'
        '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
        f'orient="auto"><path d="M0 0 10 5 0 10z" fill="{LINE}"/></marker>'
    )
    drawn = [draw_arrow(boxes[a], boxes[b], label) for (a, b), label in arrows]
    return "\n".join([head, draw_legend(), *drawn, *map(draw_box, boxes.values()), "</svg>"]) + "\n"


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "docs/data_flow.svg"
    out.write_text(draw())
