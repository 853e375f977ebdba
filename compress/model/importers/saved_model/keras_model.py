"""The Keras 2 model that a SavedModel folder describes: rebuilt from its configuration and its weights.

The graph in the folder is not loaded, so no code in it runs.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from compress.model.importers.common import guarded_calls
from compress.model.importers.common.verification import Parity
from compress.model.importers.keras import keras2, keras_file
from compress.model.importers.keras.keras_config import stateful_layers
from compress.model.importers.saved_model.saved_model_folder import WEIGHTS, Content

if TYPE_CHECKING:
    import keras


def load(content: Content, *, trust: bool, samples: Any = None) -> tuple[keras.Model, Parity]:
    """Rebuild the model in Keras 3, and compare its outputs with those of tf-keras, also for real `samples` [n, ...].

    Raises:
        UntrustedError: loading would run code, and `trust` is not set.
        ModelError: the folder is damaged, or Keras 3 cannot express the model.
    """
    assert content.config is not None  # the caller has checked it
    judged = content.judged
    keras_file.check_loadable(content.path, content.config, judged.untrusted, judged.unsupported, trust=trust)
    what = f"cannot be loaded (written by Keras {content.keras_version})"
    with guarded_calls.quiet(), guarded_calls.explained(content.path, what, keras_file.RESAVE):
        import tf_keras

        with guarded_calls.bounded():
            old = tf_keras.models.model_from_json(json.dumps(content.config))
        status = old.load_weights(str(content.path / WEIGHTS))
        if old.weights:
            status.assert_existing_objects_matched()
        model, parity = keras2.rebuild(old, str(content.path), samples)
        return keras_file.usable(model, stateful_layers(content.config)), parity
