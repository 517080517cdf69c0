"""Nearest neighbors on stored features: nothing is trained, nothing is chosen."""

from __future__ import annotations

from collections.abc import Mapping

from kscl.config import Section, key
from kscl.engine.knn import knn_predict
from kscl.records.record import Metric, Protocol
from kscl.run.task import task
from kscl.runtime.distributed import device
from linear_eval.config import CENTER
from linear_eval.probe import Json, Probe
from linear_eval.probes.cached import stored_views
from linear_eval.score import Outcome, score


@task("knn", title="Classifier (nearest neighbors)")
class Knn(Probe):
    """Let the k nearest train images vote, without training, for each k."""

    metrics = (Metric("top1", "kNN", headline=True, per_image=True),)

    class Keys(Section):
        class KNN(Section):
            """The nearest-neighbor probe."""

            K = key(
                [20, 200], "Numbers of neighbors; each has a record.", distinct=True, at_least=1
            )
            TEMPERATURE = key(
                0.07, "Neighbors vote with weight exp(cosine / temperature).", above=0
            )

    def settings(self) -> Json:
        """Return the vote."""
        return {
            "k": self.cfg.KNN.K[0],
            "temperature": self.cfg.KNN.TEMPERATURE,
            "similarity": "cosine",
            "vote": "exp(similarity / temperature)",
        }

    def protocol(self, sizes: Mapping[str, int]) -> Protocol:
        """Return the protocol of the first number of neighbors."""
        return self.protocol_of(self.cfg.KNN.K[0])

    def protocol_of(self, k: int) -> Protocol:
        """Return the protocol of one number of neighbors."""
        return Protocol(f"knn{k}-T{self.cfg.KNN.TEMPERATURE:g}", self.definition() | {"k": k})

    def train_views(self) -> list[str]:
        """Return all views that the cached probe would store, so that it decodes nothing again."""
        return stored_views(self.cfg)

    def outcomes(self) -> list[Outcome]:
        """Return one result per number of neighbors."""
        train, val = self.data["train"], self.data["val"]
        found = []
        for number, k in enumerate(self.cfg.KNN.K):
            predicted = knn_predict(
                self.features["train"].of_view(CENTER),
                train.targets,
                self.features["val"].of_view(CENTER),
                k=k,
                temperature=self.cfg.KNN.TEMPERATURE,
                num_classes=len(train.classes),
                device=device(),
            )
            result = score(predicted.cpu()[:, None], val.targets, val.classes)
            part = f"knn{k}" if number else ""
            found.append(Outcome(result, part=part, protocol=self.protocol_of(k)))
        return found
