"""Setups that are known to work, by task and name."""

from headwise.apps.train.recipe import Recipe
from headwise.apps.train.setups import LanguageSetup, Setup, TranslateSetup, VisionSetup
from headwise.models import GPTConfig, TransformerConfig, ViTConfig
from headwise.nn import GELU, PreNorm, ReLU, SwiGLU

PRESETS: dict[str, dict[str, Setup]] = {
    "translate": {
        # Two cores, a few minutes: short sentences only.
        "tiny": TranslateSetup(
            data="tatoeba-en-fr",
            vocabulary=2000,
            pairs=40_000,
            model=TransformerConfig(
                vocabulary=2000,
                d_model=128,
                encoder_layers=2,
                decoder_layers=2,
                heads=4,
                feed_forward=ReLU(256),
                arrangement=PreNorm(),
                dropout=0.0,
            ),
            recipe=Recipe(
                steps=700,
                learning_rate=3e-3,
                warmup=100,
                label_smoothing=0.1,
                evaluate_every=100,
                checkpoint_every=100,
            ),
            tokens=2048,
            longest=32,
        ),
        # The built-in translator: one GPU.
        "small": TranslateSetup(
            data="tatoeba-en-fr",
            vocabulary=6000,
            model=TransformerConfig(
                vocabulary=6000,
                d_model=256,
                encoder_layers=3,
                decoder_layers=3,
                heads=8,
                feed_forward=ReLU(512),
                arrangement=PreNorm(),
                dropout=0.2,
            ),
            recipe=Recipe(
                steps=12_000,
                learning_rate=1.5e-3,
                warmup=1000,
                weight_decay=0.01,
                label_smoothing=0.1,
                log_every=100,
                evaluate_every=1000,
                checkpoint_every=1000,
            ),
            tokens=8192,
        ),
    },
    "language": {
        "tiny": LanguageSetup(
            data="wikitext-2",
            vocabulary=1000,
            model=GPTConfig(
                vocabulary=1000,
                context=256,
                d_model=128,
                layers=2,
                heads=4,
                feed_forward=SwiGLU(256),
            ),
            recipe=Recipe(
                steps=300,
                learning_rate=3e-3,
                warmup=50,
                evaluate_every=100,
                checkpoint_every=100,
            ),
            batch=8,
        ),
        # The built-in GPT: one GPU.
        "small": LanguageSetup(
            data="enwik8",
            vocabulary=4096,
            model=GPTConfig(
                vocabulary=4096,
                context=4096,
                d_model=256,
                layers=6,
                heads=8,
                feed_forward=SwiGLU(640),
            ),
            recipe=Recipe(
                steps=7000,
                learning_rate=2e-3,
                warmup=300,
                compile=True,
                betas=(0.9, 0.95),
                log_every=50,
                evaluate_every=500,
                checkpoint_every=500,
            ),
            batch=16,
        ),
    },
    "vision": {
        "tiny": VisionSetup(
            data="mnist",
            model=ViTConfig(
                image=28, patch=7, channels=1, d_model=64, layers=3, heads=4, feed_forward=GELU(128)
            ),
            recipe=Recipe(steps=600, warmup=100, evaluate_every=200, checkpoint_every=200),
            batch=64,
        ),
        "small": VisionSetup(
            data="cifar-10",
            model=ViTConfig(d_model=256, layers=8, heads=8, feed_forward=GELU(768)),
            recipe=Recipe(
                steps=10_000,
                learning_rate=1e-3,
                warmup=1000,
                label_smoothing=0.1,
                log_every=100,
                evaluate_every=1000,
                checkpoint_every=1000,
            ),
            batch=512,
        ),
    },
}
"""The presets of each task; `tiny` learns something on two cores in a few minutes."""


def preset(task: str, name: str) -> Setup:
    """A preset by task and name.

    >>> preset("translate", "tiny").data
    'tatoeba-en-fr'
    """
    if task not in PRESETS:
        raise ValueError(f"there is no task {task!r}; the tasks are {', '.join(PRESETS)}")
    if name not in PRESETS[task]:
        known = ", ".join(PRESETS[task])
        raise ValueError(f"{task} has no preset {name!r}; it has {known}")
    return PRESETS[task][name]
