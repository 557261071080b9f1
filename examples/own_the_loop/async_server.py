"""The half that generates: ``python -m examples.own_the_loop.async_server``, in a terminal of its own."""

import argparse

from examples.tiny.task import write_task
from lightrl import RolloutServer

ADDRESS = "tcp://127.0.0.1:5570"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default=ADDRESS, help="tcp://HOST:PORT or ipc://PATH to listen on")
    parser.add_argument("--out", default="runs/own_the_loop", help="folder for model and data")
    args = parser.parse_args()
    task = write_task(args.out)
    server = RolloutServer(task.model_dir, queue_address=args.address, group_size=8, max_completion_tokens=4)
    server.run(task.train)


if __name__ == "__main__":
    main()
