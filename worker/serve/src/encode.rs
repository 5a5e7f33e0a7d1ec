//! Answers and metadata as msgpack, in the form that `decode` describes.

use coxswain_task::{NamedValues, Value};

/// A message of named values, and of times in milliseconds under `server_timing`.
pub fn encode(named: &NamedValues, timing: &[(&str, f64)]) -> Vec<u8> {
    let mut out = Message::default();
    out.named(named, named.len() + 1);
    out.text("server_timing");
    out.map(timing.len());
    for (name, milliseconds) in timing {
        out.text(name);
        out.float(*milliseconds);
    }
    out.0
}

/// A message that says what a JSON value says.
pub fn encode_json(value: &serde_json::Value) -> Vec<u8> {
    let mut out = Message::default();
    out.json(value);
    out.0
}

/// A message that is being written, into memory.
#[derive(Default)]
pub struct Message(pub Vec<u8>);

/// Vectors grow; nothing else can go wrong.
const GROWS: &str = "a vector takes whatever is written";

impl Message {
    pub fn map(&mut self, entries: usize) {
        rmp::encode::write_map_len(&mut self.0, entries as u32).expect(GROWS);
    }

    /// A map of so many entries that begins with these.
    fn named(&mut self, named: &NamedValues, entries: usize) {
        self.map(entries);
        for (name, value) in named {
            self.text(name);
            match value {
                Value::Text(text) => self.text(text),
                Value::Integer(value) => self.integer(*value),
                Value::Bytes(array) => self.array("|u1", &array.shape, &array.values),
                Value::Numbers(array) => {
                    let bytes: Vec<u8> = array.values.iter().flat_map(|value| value.to_le_bytes()).collect();
                    self.array("<f4", &array.shape, &bytes);
                }
            }
        }
    }

    fn list(&mut self, entries: usize) {
        rmp::encode::write_array_len(&mut self.0, entries as u32).expect(GROWS);
    }

    pub fn text(&mut self, text: &str) {
        rmp::encode::write_str(&mut self.0, text).expect(GROWS);
    }

    fn bytes(&mut self, bytes: &[u8]) {
        rmp::encode::write_bin(&mut self.0, bytes).expect(GROWS);
    }

    fn integer(&mut self, value: i64) {
        rmp::encode::write_sint(&mut self.0, value).expect(GROWS);
    }

    fn float(&mut self, value: f64) {
        rmp::encode::write_f64(&mut self.0, value).expect(GROWS);
    }

    fn boolean(&mut self, value: bool) {
        rmp::encode::write_bool(&mut self.0, value).expect(GROWS);
    }

    pub fn array(&mut self, dtype: &str, shape: &[usize], data: &[u8]) {
        self.map(4);
        self.bytes(b"__ndarray__");
        self.boolean(true);
        self.bytes(b"data");
        self.bytes(data);
        self.bytes(b"dtype");
        self.text(dtype);
        self.bytes(b"shape");
        self.list(shape.len());
        shape.iter().for_each(|axis| self.integer(*axis as i64));
    }

    fn json(&mut self, value: &serde_json::Value) {
        match value {
            serde_json::Value::Null => rmp::encode::write_nil(&mut self.0).expect(GROWS),
            serde_json::Value::Bool(value) => self.boolean(*value),
            serde_json::Value::Number(number) => match number.as_i64() {
                Some(value) => self.integer(value),
                None => self.float(number.as_f64().unwrap_or(f64::NAN)),
            },
            serde_json::Value::String(text) => self.text(text),
            serde_json::Value::Array(values) => {
                self.list(values.len());
                values.iter().for_each(|value| self.json(value));
            }
            serde_json::Value::Object(entries) => {
                self.map(entries.len());
                for (name, value) in entries {
                    self.text(name);
                    self.json(value);
                }
            }
        }
    }
}

/// A message that is named values and nothing else, as a client writes it.
#[cfg(test)]
pub fn encode_flat(named: &NamedValues) -> Vec<u8> {
    let mut out = Message::default();
    out.named(named, named.len());
    out.0
}
