//! What a request's values are, whatever their feature.

use coxswain_task::{BadRequest, Value};

/// Pixels with their channels beside each other, of an image that has them apart.
pub(super) fn channels_last(planes: &[u8]) -> Vec<u8> {
    let of_plane = planes.len() / 3;
    (0..of_plane).flat_map(|at| [planes[at], planes[of_plane + at], planes[2 * of_plane + at]]).collect()
}

/// None of text and of a single number.
pub(super) fn shape_of(value: &Value) -> Option<&[usize]> {
    match value {
        Value::Numbers(array) => Some(&array.shape),
        Value::Bytes(array) => Some(&array.shape),
        Value::Text(_) | Value::Integer(_) => None,
    }
}

/// The numbers of a value; none if it is text.
pub(super) fn as_numbers(value: &Value) -> Option<Vec<f32>> {
    match value {
        Value::Numbers(array) => Some(array.values.clone()),
        Value::Bytes(array) => Some(array.values.iter().map(|value| f32::from(*value)).collect()),
        Value::Integer(value) => Some(vec![*value as f32]),
        Value::Text(_) => None,
    }
}

/// An error names the value and its first element that is no number.
pub(super) fn check_finite(name: &str, values: &[f32]) -> Result<(), BadRequest> {
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(at) => Err(BadRequest::new(name, format!("element {at} is {}; must be finite", values[at]))),
    }
}

/// As an error says what was found.
pub(super) fn kind(value: &Value) -> String {
    match value {
        Value::Text(_) => "text".to_owned(),
        Value::Integer(value) => value.to_string(),
        Value::Bytes(array) => format!("{} {:?}", array.dtype, array.shape),
        Value::Numbers(array) => format!("{} {:?}", array.dtype, array.shape),
    }
}
