"""Texts for check.py: three languages and code.  They were written for it."""

from __future__ import annotations

__all__ = ["PROMPTS", "SENTENCES", "TEXTS"]

TEXTS = {
    "English": (
        "The lighthouse at the end of the pier was built in 1872, after two fishing boats had been lost in the same "
        "winter. Its lamp burned oil until 1931, when a cable was laid along the sea floor. Today nobody lives there: "
        "a small computer switches the light on at dusk and writes a line into a log whenever a bulb fails. Visitors "
        "may climb the 143 steps on the first Sunday of each month, unless the wind is stronger than forty knots. "
        "From the gallery one sees the whole bay, the ferries, and on clear days the mountains of the mainland."
    ),
    "German": (
        "Am Rand der Stadt steht eine alte Mühle, deren Rad sich seit Jahrzehnten nicht mehr dreht. Im Erdgeschoss hat "
        "eine Bäckerin ihren Laden eröffnet, und an Samstagen reicht die Schlange bis zur Brücke. Sie bäckt mit Roggen "
        "aus der Umgebung, Salz und Wasser; der Sauerteig ist älter als sie selbst. Wer früh genug kommt, darf den "
        "Ofen sehen, den ihr Großvater 1954 gemauert hat. Über die Preise wird viel gestritten, über das Brot nicht."
    ),
    "Chinese": (
        "春天的时候，村子后面的山坡上开满了白色的花。老人们说，这些树是一百多年前从南方带来的，那时候路还没有修好，"
        "人们要走三天才能到最近的集市。现在每天有两班汽车，年轻人早上出去工作，晚上回来吃饭。学校里只剩下二十七个学生，"
        "老师却不愿意离开。她说：只要还有一个孩子想读书，我就留在这里。夏天下雨以后，河水会漫过小桥，大家就坐在屋檐下喝茶聊天。"
    ),
    "code": (
        "import heapq\n\n\ndef shortest_paths(graph: dict[str, dict[str, float]], start: str) -> dict[str, float]:\n"
        '    """Return the distance of each reachable node from start."""\n'
        "    distances = {start: 0.0}\n    queue = [(0.0, start)]\n    while queue:\n"
        "        distance, node = heapq.heappop(queue)\n        if distance > distances[node]:\n            continue\n"
        "        for neighbour, weight in graph.get(node, {}).items():\n            candidate = distance + weight\n"
        "            if candidate < distances.get(neighbour, float('inf')):\n"
        "                distances[neighbour] = candidate\n"
        "                heapq.heappush(queue, (candidate, neighbour))\n    return distances\n"
    ),
}
"""Texts of at least 100 tokens each, whose positions are compared."""
PROMPTS = {
    "English": "The capital of France is",
    "German": "Die drei größten Städte Deutschlands sind",
    "Chinese": "中国最长的河流是",
    "code": "def fibonacci(n):\n    ",
}
SENTENCES = (
    "A lighthouse keeper writes down the weather.",
    "The bakery opens at six.",
    "Wer früh kommt, bekommt frisches Brot.",
    "学校里只剩下二十七个学生。",
    "def add(a, b): return a + b",
    " ".join(["A long sentence about boats, lamps and the sea."] * 12),
)
