"""Checks Kubernetes manifests against their schemas: `check_deploy.py FILE...`, a line for each resource.

JobSet, TrainJob and TrainingRuntime are read by the models of `kubeflow-trainer-api`; what comes out again must be
what went in, so that a key that is misspelled or at the wrong place is found. Jobs in them, and what Kubernetes itself
has, are checked by `kubernetes-validate`, strictly. Exit code 77 where these packages are missing.
"""

import sys

try:
    import kubernetes_validate
    import yaml
    from kubeflow_trainer_api import models
except ImportError as missing:
    print(f"skipped: {missing}; pip install kubeflow-trainer-api kubernetes-validate")
    sys.exit(77)

MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}


def normal(value):
    """Models read quantities as numbers of another kind."""
    if isinstance(value, dict):
        return {key: normal(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [normal(inner) for inner in value]
    return str(float(value)) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def lost(given, kept, path=""):
    """Paths that a model did not keep."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [where for key in given for where in lost(given[key], kept.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [where for at, pair in enumerate(zip(given, kept)) for where in lost(*pair, f"{path}[{at}]")]
    return [] if normal(given) == normal(kept) else [path]


def jobs(resource):
    """The batch/v1 Jobs that it makes."""
    spec = resource["spec"]
    spec = spec["template"]["spec"] if resource["kind"] == "TrainingRuntime" else spec
    for job in spec.get("replicatedJobs", []):
        template = {"metadata": {"name": job["name"], **job["template"].get("metadata", {})}, "spec": job["template"]["spec"]}
        yield {"apiVersion": "batch/v1", "kind": "Job", **template}


def check(resource):
    model = MODELS.get(resource["kind"])
    if model is None:
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)
        return
    read = model.from_dict(resource)
    unknown = lost(resource, read.to_dict())
    if unknown:
        raise ValueError(f"unknown to the schema: {', '.join(unknown)}")
    for job in jobs(resource):
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)


failed = False
for path in sys.argv[1:]:
    for resource in yaml.safe_load_all(open(path)):
        try:
            check(resource)
            print(f"{path}: {resource['kind']} is well")
        except Exception as error:  # whatever the packages raise
            failed = True
            print(f"{path}: {resource['kind']}: {error}")
sys.exit(failed)
