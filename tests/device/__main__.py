"""``python -m tests.device`` prints what a step launches today."""

from tests.device import software


if __name__ == "__main__":
    software.load()
    from tests.device.launches import table

    print(table())
