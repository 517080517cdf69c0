"""Nearest neighbors on stored features: no training, nothing to choose."""

from __future__ import annotations

from collections.abc import Iterator

from kscl.config import Section, key
from kscl.engine.knn import knn_predict
from kscl.records.record import Metric
from kscl.run.task import task
from kscl.runtime.distributed import device
from linear_eval.probe import Json, Probe
from linear_eval.probes.cached import stored_views
from linear_eval.score import Outcome, score


@task("knn", title="Classifier (nearest neighbors)")
class Knn(Probe):
    """Classify by a vote of the k nearest train images, for each k."""

    metrics = (Metric("top1", "kNN", headline=True, per_image=True),)

    class Keys(Section):
        class KNN(Section):
            """The nearest-neighbor probe."""

            K = key([20, 200], "Numbers of neighbors; a record each.", distinct=True, at_least=1)
            TEMPERATURE = key(0.07, "Neighbors vote with weight exp(cosine / T).", above=0)

    def settings(self) -> Json:
        vote = {"similarity": "cosine", "vote": "exp(similarity / temperature)"}
        return {"k": self.cfg.KNN.K[0], "temperature": self.cfg.KNN.TEMPERATURE, **vote}

    @property
    def protocol_id(self) -> str:
        return f"knn{self.cfg.KNN.K[0]}-T{self.cfg.KNN.TEMPERATURE:g}"

    def train_views(self) -> list[str]:
        return stored_views(self.cfg)  # the cached probe's, which then decodes nothing again

    def outcomes(self) -> Iterator[Outcome]:
        train, val, temperature = self.data["train"], self.data["val"], self.cfg.KNN.TEMPERATURE
        features = self.centers("train"), train.targets, self.centers("val")
        for k in self.cfg.KNN.K:
            settings = (k, temperature, len(train.classes))
            predicted = knn_predict(*features, *settings, device=device())
            yield Outcome(
                score(predicted.cpu()[:, None], val.targets, val.classes),
                part=f"knn{k}" if k != self.cfg.KNN.K[0] else "",
                protocol=self.protocol(f"knn{k}-T{temperature:g}", k=k),
            )
