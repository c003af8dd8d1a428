"""Recognize a digit in a picture of 8 x 8 grey values: Python before and after a network, as two methods."""

from penstock import servable

network = servable.model(
    "digits.onnx",
    inputs={"image": "FP32[64]"},
    outputs={"scores": "FP32[10]"},
    batch_size=32,
    preferred_sizes=(8, 16),
    max_delay_ms=1,
)


@servable.stage(outputs={"image": "FP32[64]"}, batch_size=32)
def normalize(image):
    """Scale pictures [n, 64] with values from 0 to 16."""
    if (image < 0).any() or (image > 16).any():
        raise servable.InputError("image: grey values must be from 0 to 16")
    return image / 16


@servable.stage(outputs={"label": "INT64[]"})
def best(scores):
    """Return the digit with the highest score for one picture."""
    return scores.argmax()


@servable.stage(outputs={"labels": "INT64[3]", "scores": "FP32[3]"})
def best_three(scores):
    """Return the three likeliest digits for one picture, and their scores."""
    labels = scores.argsort()[:-4:-1]
    return {"labels": labels, "scores": scores[labels]}


@servable.method(inputs={"image": "FP32[64]"}, outputs={"label": "INT64[]"})
def classify_top1(image):
    return best(network(normalize(image)))


@servable.method(inputs={"image": "FP32[64]"}, outputs={"labels": "INT64[3]", "scores": "FP32[3]"})
def classify_top3(image):
    return best_three(network(normalize(image)))


servable.settings(default_method="classify_top1")
