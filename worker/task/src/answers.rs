//! A trained model in use: named values in, named values out.
//!
//! A request is checked and prepared by a [`RequestReader`], on any thread; a [`Responder`] computes the
//! answers of several at once, on its own. The server that carries them over a wire knows neither their names
//! nor what they mean.

use std::{collections::BTreeMap, error::Error, fmt, sync::Arc};

use crate::{Sample, TaskError};

/// The values of a request or of an answer, by name.
pub type NamedValues = BTreeMap<String, Value>;

/// One value of a request or of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Text.
    Text(String),
    /// A whole number.
    Integer(i64),
    /// An array of bytes, as pictures are.
    Bytes(Array<u8>),
    /// An array of other numbers.
    Numbers(Array<f32>),
}

/// An array, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Array<T> {
    /// Length of each axis; none for a single number.
    pub shape: Vec<usize>,
    /// As many values as the shape has.
    pub values: Vec<T>,
    /// The type that the sender's array has, as NumPy names it; `numbers` of a list.
    pub dtype: &'static str,
}

impl Value {
    /// An array of bytes.
    pub fn bytes(shape: Vec<usize>, values: Vec<u8>) -> Self {
        Self::Bytes(Array { shape, values, dtype: "uint8" })
    }

    /// An array of float32.
    pub fn numbers(shape: Vec<usize>, values: Vec<f32>) -> Self {
        Self::Numbers(Array { shape, values, dtype: "float32" })
    }
}

/// The number whose request it is, on the line it came by: given to each request that does not bring one, so
/// that what is drawn for it can be drawn again.
pub const SEED: &str = "seed";

/// Why a request cannot be answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadRequest {
    /// The value that is at fault.
    pub name: String,
    /// What was found, what was expected.
    pub problem: String,
}

impl BadRequest {
    /// From both.
    pub fn new(name: &str, problem: impl Into<String>) -> Self {
        Self { name: name.to_owned(), problem: problem.into() }
    }
}

impl fmt::Display for BadRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.problem)
    }
}

impl Error for BadRequest {}

/// Checks requests, and makes of them what the model takes. Shared by threads.
pub trait RequestReader: Send + Sync {
    /// What requests must have and what answers have, told to every client: a JSON object.
    fn describe(&self) -> serde_json::Value;

    /// A request that is as large as any, to warm up with.
    fn example(&self) -> NamedValues;

    /// A request, prepared.
    fn read(&self, request: &NamedValues) -> Result<Box<dyn Sample>, BadRequest>;
}

/// A trained model that answers requests. Made and used on one thread.
pub trait Responder {
    /// What prepares its requests.
    fn reader(&self) -> Arc<dyn RequestReader>;

    /// The answers to these requests, in their order. A request's answer does not depend on the others, but
    /// for rounding.
    fn answer(&self, requests: &[Box<dyn Sample>]) -> Result<Vec<NamedValues>, TaskError>;
}
