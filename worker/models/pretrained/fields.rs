//! A JSON object whose every reading error names the file and the dotted field.

use std::path::Path;

use serde_json::{Map, Value};

use super::error::ModelError;

/// How the `model_type` of robots' policies begins.
const POLICIES: [&str; 8] =
    ["openvla", "gr00t", "spatialvla", "prismatic", "smolvla", "pi0", "internvla", "molmoact"];

/// One JSON object of a file, and where in the file it stands.
#[derive(Clone, Debug)]
pub struct Fields<'a> {
    path: &'a Path,
    scope: String,
    object: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The file's outermost object.
    pub fn new(path: &'a Path, json: &'a Value) -> Result<Self, ModelError> {
        let object = json.as_object().ok_or_else(|| ModelError::Config {
            path: path.into(),
            field: "(whole file)".into(),
            problem: "expected a JSON object".into(),
        })?;
        Ok(Self { path, scope: String::new(), object })
    }

    /// An error about one field.
    pub fn error(&self, field: &str, problem: impl Into<String>) -> ModelError {
        ModelError::Config {
            path: self.path.into(),
            field: format!("{}{field}", self.scope),
            problem: problem.into(),
        }
    }

    /// The field's value; `null` counts as absent, as it does in Transformers.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    fn typed<T>(
        &self,
        field: &str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.error(field, format!("{value}; expected {expected}")))
    }

    /// A nested object.
    pub fn object(&self, field: &str) -> Result<Option<Fields<'a>>, ModelError> {
        let object = self.typed(field, "an object", Value::as_object)?;
        Ok(object.map(|object| Fields { path: self.path, scope: format!("{}{field}.", self.scope), object }))
    }

    /// A number that is not negative.
    pub fn uint(&self, field: &str) -> Result<Option<usize>, ModelError> {
        self.typed(field, "a whole number", as_usize)
    }

    /// A size: present and positive.
    pub fn size(&self, field: &str) -> Result<usize, ModelError> {
        match self.uint(field)? {
            None => Err(self.error(field, "missing; expected a positive whole number")),
            Some(0) => Err(self.error(field, "0; expected a positive whole number")),
            Some(size) => Ok(size),
        }
    }

    /// A side of a patch, written as a number or as a list of equal numbers.
    pub fn side(&self, field: &str) -> Result<Option<usize>, ModelError> {
        self.typed(field, "a whole number, or a list of equal whole numbers", |value| match value {
            Value::Array(sides) => {
                let first = as_usize(sides.first()?)?;
                sides.iter().all(|side| as_usize(side) == Some(first)).then_some(first)
            }
            side => as_usize(side),
        })
    }

    /// A list of numbers that are not negative.
    pub fn uints(&self, field: &str) -> Result<Option<Vec<usize>>, ModelError> {
        self.typed(field, "a list of whole numbers", |value| value.as_array()?.iter().map(as_usize).collect())
    }

    /// A positive, finite number.
    pub fn positive(&self, field: &str) -> Result<Option<f64>, ModelError> {
        self.typed(field, "a positive number", |value| value.as_f64().filter(|v| *v > 0.0 && v.is_finite()))
    }

    /// A boolean.
    pub fn bool(&self, field: &str) -> Result<Option<bool>, ModelError> {
        self.typed(field, "true or false", Value::as_bool)
    }

    /// A string.
    pub fn str(&self, field: &str) -> Result<Option<&'a str>, ModelError> {
        self.typed(field, "a string", Value::as_str)
    }

    /// The field, if present, must be this string.
    pub fn expect_str(&self, field: &str, expected: &str) -> Result<(), ModelError> {
        match self.str(field)? {
            Some(found) if found != expected => {
                Err(self.error(field, format!("{found:?}; only {expected:?} is supported")))
            }
            _ => Ok(()),
        }
    }

    /// Refuses by what they are: the configuration of a robot's policy, which is no pretrained model, and
    /// that of weights in few bits. `wanted` is what a run begins with.
    pub fn expect_pretrained(&self, wanted: &str) -> Result<(), ModelError> {
        let kind = self.get("model_type").and_then(Value::as_str);
        if kind == Some("Gr00tN1d7") {
            let problem = "a base model, which has no cameras, state or action; `cox init DATA --model MODEL \
                           --out FILE` makes a policy of it for a data set, with a run file";
            return Err(self.error("model_type", problem));
        }
        // LeRobot's have a `type`, and no `model_type`.
        let policy = match kind {
            None => self.get("type").and_then(Value::as_str).map(|kind| ("type", kind, "a LeRobot policy")),
            Some(kind) => POLICIES.iter().any(|name| kind.to_lowercase().starts_with(name)).then_some((
                "model_type",
                kind,
                "a robot's policy",
            )),
        };
        if let Some((field, kind, what)) = policy {
            return Err(self.error(
                field,
                format!(
                    "{kind:?} is {what}, not a pretrained model; set `model.path` to the Hugging Face \
                     directory of the model that the policy starts from: {wanted}"
                ),
            ));
        }
        let Some(quantised) = self.object("quantization_config")? else { return Ok(()) };
        let method = quantised.str("quant_method")?.unwrap_or("unnamed method");
        Err(self.error(
            "quantization_config",
            format!(
                "quantised weights ({method}) are not supported; use the checkpoint that they were made \
                 from: `model.weights_dtype: nf4` (or `int8`) quantises it while loading"
            ),
        ))
    }

    /// `small`, the value of `field`, must be positive and divide `large`.
    pub fn divides(
        &self,
        field: &str,
        small: usize,
        large_field: &str,
        large: usize,
    ) -> Result<(), ModelError> {
        if small == 0 || !large.is_multiple_of(small) {
            return Err(self.error(field, format!("{small} does not divide {large_field} {large}")));
        }
        Ok(())
    }

    /// Two spellings of one field must agree where both are present.
    pub fn same_if_both(&self, a: &str, b: &str) -> Result<(), ModelError> {
        match (self.get(a), self.get(b)) {
            (Some(x), Some(y)) if x != y => Err(self.error(a, format!("{x}, but `{b}` is {y}"))),
            _ => Ok(()),
        }
    }

    /// Fields that two objects repeat must agree.
    pub fn agree(&self, other: &Fields<'_>, fields: &[&str]) -> Result<(), ModelError> {
        for field in fields {
            match (self.get(field), other.get(field)) {
                (Some(x), Some(y)) if x != y => {
                    return Err(self.error(field, format!("{x}, but `{}{field}` is {y}", other.scope)));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn as_usize(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|v| usize::try_from(v).ok())
}
