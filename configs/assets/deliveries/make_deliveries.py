"""Makes the texts of configs/seq2seq.yaml, the same bytes every time: python3 make_deliveries.py

Notices of deliveries in Korean, each with what matters of it in a few words. Needs nothing but Python.
"""

import csv
import pathlib
import random

HERE = pathlib.Path(__file__).parent
NAMES = ["김민수", "이서연", "박지훈", "최유진", "정하늘"]
ITEMS = ["사과", "우유", "공책", "의자", "모자", "커피"]
COUNTS = ["한", "두", "세", "네"]
DAYS = ["월요일", "화요일", "수요일", "목요일", "금요일"]
PLACES = ["회사로", "학교로", "서울로", "제주로"]
FORMS = [
    "{name}님, 주문하신 {item} {count} 개가 {day} {place} 배송됩니다.",
    "안내: {day}에 {item} {count} 개를 {place} 보내 드립니다. {name}님, 감사합니다.",
    "{name}님의 {item} {count} 개는 {place} 가며, {day}에 도착합니다.",
]
PAIRS = 360


def main():
    draw = random.Random(20)
    with open(HERE / "pairs.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["text", "summary"])
        for _ in range(PAIRS):
            pick = {"name": NAMES, "item": ITEMS, "count": COUNTS, "day": DAYS, "place": PLACES}
            words = {key: draw.choice(among) for key, among in pick.items()}
            table.writerow([draw.choice(FORMS).format(**words), "{item} {count} 개, {day}".format(**words)])


if __name__ == "__main__":
    main()
