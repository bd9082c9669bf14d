"""Schemas to hold manifests against: the CRDs of JobSet and PathwaysJob (outside this repository), made strict."""

import copy
import functools
from pathlib import Path

import jsonschema
import pytest
import yaml

SHARED = Path(__file__).parents[4] / "shared" / "launch"
CRDS = {"JobSet": "jobset.x-k8s.io_jobsets.yaml", "PathwaysJob": "pathways-job.pathways.domain_pathwaysjobs.yaml"}


def strict(schema):
    """An OpenAPI v3 schema as JSON schema in which an unknown field is an error."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items() if not str(key).startswith("x-kubernetes")}
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    if made.get("type") == "object" and "properties" in made and "additionalProperties" not in made:
        made["additionalProperties"] = False
    return made


@functools.cache
def validator(kind: str):
    path = SHARED / "crds" / CRDS[kind]
    if not path.exists():
        pytest.skip(f"the CRD of {kind} is not here: {path} (third-party schemas are not committed)")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    crd = yaml.load(path.read_text(), Loader=loader)
    version = next(version for version in crd["spec"]["versions"] if version["served"])
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"] |= {"metadata": {"type": "object"}}
    if "status" in schema["properties"]:
        schema["properties"] |= {"status": {}}
    return jsonschema.Draft202012Validator(schema)


def crd_errors(manifest) -> list[str]:
    found = validator(manifest["kind"]).iter_errors(copy.deepcopy(manifest))
    return [f"{'.'.join(map(str, error.path))}: {error.message[:200]}" for error in found]
