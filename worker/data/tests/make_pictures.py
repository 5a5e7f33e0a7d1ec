"""Small JPEG files for tests: `python make_pictures.py` (Pillow 13.0)."""

from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent / "fixtures" / "pictures"


def main():
    HERE.mkdir(exist_ok=True)
    picture = Image.new("RGB", (17, 11))
    picture.putdata([(x * 15, y * 23, (x * y) % 256) for y in range(11) for x in range(17)])
    picture.save(HERE / "baseline.jpg", quality=60)
    picture.save(HERE / "progressive.jpg", quality=60, progressive=True, subsampling=2)
    picture.convert("L").save(HERE / "grey.jpg", quality=60, restart_marker_blocks=1)


if __name__ == "__main__":
    main()
