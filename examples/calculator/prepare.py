"""Write the warm model and the prompts for config.yaml: ``python -m examples.calculator.prepare``."""

import argparse
import json
from pathlib import Path

from examples.calculator.run import imitate, make_parts, split


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.calculator.prepare", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/calculator"))
    parser.add_argument("--warm-up-steps", type=int, default=300, help="steps of imitation")
    args = parser.parse_args(argv)
    folder = args.out / "task"
    tokenizer, model = make_parts(seed=0)
    imitate(model, tokenizer, args.warm_up_steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    train, test = split(seed=0)
    for name, rows in (("train", train * 4), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(folder)


if __name__ == "__main__":
    main()
