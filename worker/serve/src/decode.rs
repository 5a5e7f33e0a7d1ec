//! msgpack as openpi's clients write and read it: maps of named values, arrays of NumPy as maps of their own.
//!
//! ```text
//! {b"__ndarray__": true, b"data": bytes, b"dtype": "<f4", b"shape": [16, 4]}       an array, C order
//! {b"__npgeneric__": true, b"data": number, b"dtype": "<f4"}                       a scalar of NumPy
//! {"images": {"cam_high": ..}}                                                     as "images/cam_high"
//! ```
//!
//! Nothing is built that was not asked for: what is no named value is refused or skipped while it is read, so
//! that a message costs no more memory than its own bytes and the arrays in it. There are no objects to
//! revive: the types of an array are those of [`numbers`], and any other is refused.

#[cfg(test)]
mod tests;

use coxswain_task::{Array, NamedValues, Value};
use rmp::Marker;

/// Deepest nesting that is skipped.
const MAX_DEPTH: usize = 16;
/// Most values of an observation: each costs more memory than it has bytes.
const MAX_ENTRIES: u32 = 256;
/// Longest name, as it is repeated where maps are nested.
const MAX_NAME_BYTES: usize = 256;
/// Maps within each other that are taken apart.
const MAX_NESTED: usize = 2;
/// Most numbers of a list, for the same reason.
const MAX_LISTED: u32 = 64 << 10;
/// Most axes of an array.
const MAX_AXES: u32 = 8;

/// Arrays that another packer has packed.
const FOREIGN: &str = "an array packed by the package msgpack-numpy, which cannot read this server's answers; pack \
                       with openpi_client.msgpack_numpy, of the package openpi-client";

/// What is wrong with a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// No msgpack, or a piece of it.
    #[error("not msgpack: it ends within a value")]
    Truncated,
    /// Bytes that mean nothing there.
    #[error("not msgpack: no value begins with byte {0:#04x}")]
    Garbled(u8),
    /// Text that is not UTF-8.
    #[error("not msgpack: a text is not UTF-8")]
    Text,
    /// Bytes after the last value.
    #[error("{0} bytes follow the observation; send one map in a message")]
    Trailing(usize),
    /// Nested too deep.
    #[error("values nested deeper than {MAX_DEPTH}; send a flat map")]
    Deep,
    /// More values than an observation has.
    #[error("{0} entries in a map; an observation has at most {MAX_ENTRIES}")]
    Entries(u32),
    /// A name that is none.
    #[error("a name of {0} bytes; the maximum is {MAX_NAME_BYTES}")]
    Name(usize),
    /// Not a map of named values.
    #[error("an observation is a map from names to values; found {0}")]
    NoMap(&'static str),
    /// A value of a type that is none of ours.
    #[error("{name}: {problem}")]
    Value {
        /// Name.
        name: String,
        /// What was found, and what to send instead.
        problem: String,
    },
}

/// A value as it lies in the message; of containers the number of entries that follow.
#[derive(Debug)]
enum Token<'m> {
    Nil,
    Bool(bool),
    Integer(i64),
    Float(f64),
    Text(&'m str),
    Bytes(&'m [u8]),
    List(u32),
    Map(u32),
    Extension,
}

impl Token<'_> {
    fn kind(&self) -> &'static str {
        match self {
            Self::Nil => "nil",
            Self::Bool(_) => "a boolean",
            Self::Integer(_) => "a whole number",
            Self::Float(_) => "a number",
            Self::Text(_) => "text",
            Self::Bytes(_) => "bytes",
            Self::List(_) => "a list",
            Self::Map(_) => "a map",
            Self::Extension => "an extension type",
        }
    }
}

/// What is left of a message.
struct MessageRest<'m>(&'m [u8]);

impl<'m> MessageRest<'m> {
    fn take(&mut self, count: usize) -> Result<&'m [u8], WireError> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(WireError::Truncated)?;
        self.0 = rest;
        Ok(taken)
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        Ok(self.take(N)?.try_into().expect("as many were taken"))
    }

    /// A big-endian length of so many bytes.
    fn length(&mut self, width: usize) -> Result<u32, WireError> {
        Ok(self.take(width)?.iter().fold(0, |length, byte| length << 8 | u32::from(*byte)))
    }

    fn text(&mut self, length: u32) -> Result<Token<'m>, WireError> {
        let text = std::str::from_utf8(self.take(length as usize)?);
        text.map(Token::Text).map_err(|_| WireError::Text)
    }

    fn binary(&mut self, length: u32) -> Result<Token<'m>, WireError> {
        self.take(length as usize).map(Token::Bytes)
    }

    fn extension(&mut self, length: u32) -> Result<Token<'m>, WireError> {
        self.take(length as usize + 1).map(|_| Token::Extension)
    }

    fn next(&mut self) -> Result<Token<'m>, WireError> {
        let [byte] = self.bytes()?;
        Ok(match Marker::from_u8(byte) {
            Marker::Null => Token::Nil,
            Marker::True => Token::Bool(true),
            Marker::False => Token::Bool(false),
            Marker::FixPos(value) => Token::Integer(value.into()),
            Marker::FixNeg(value) => Token::Integer(value.into()),
            Marker::U8 => Token::Integer(u8::from_be_bytes(self.bytes()?).into()),
            Marker::U16 => Token::Integer(u16::from_be_bytes(self.bytes()?).into()),
            Marker::U32 => Token::Integer(u32::from_be_bytes(self.bytes()?).into()),
            // Beyond i64 there is no number that anything here asks for.
            Marker::U64 => {
                let value = u64::from_be_bytes(self.bytes()?);
                i64::try_from(value).map_or(Token::Float(value as f64), Token::Integer)
            }
            Marker::I8 => Token::Integer(i8::from_be_bytes(self.bytes()?).into()),
            Marker::I16 => Token::Integer(i16::from_be_bytes(self.bytes()?).into()),
            Marker::I32 => Token::Integer(i32::from_be_bytes(self.bytes()?).into()),
            Marker::I64 => Token::Integer(i64::from_be_bytes(self.bytes()?)),
            Marker::F32 => Token::Float(f32::from_be_bytes(self.bytes()?).into()),
            Marker::F64 => Token::Float(f64::from_be_bytes(self.bytes()?)),
            Marker::FixStr(length) => self.text(length.into())?,
            Marker::Str8 => self.length(1).and_then(|length| self.text(length))?,
            Marker::Str16 => self.length(2).and_then(|length| self.text(length))?,
            Marker::Str32 => self.length(4).and_then(|length| self.text(length))?,
            Marker::Bin8 => self.length(1).and_then(|length| self.binary(length))?,
            Marker::Bin16 => self.length(2).and_then(|length| self.binary(length))?,
            Marker::Bin32 => self.length(4).and_then(|length| self.binary(length))?,
            Marker::FixArray(length) => Token::List(length.into()),
            Marker::Array16 => Token::List(self.length(2)?),
            Marker::Array32 => Token::List(self.length(4)?),
            Marker::FixMap(length) => Token::Map(length.into()),
            Marker::Map16 => Token::Map(self.length(2)?),
            Marker::Map32 => Token::Map(self.length(4)?),
            Marker::FixExt1 => self.extension(1)?,
            Marker::FixExt2 => self.extension(2)?,
            Marker::FixExt4 => self.extension(4)?,
            Marker::FixExt8 => self.extension(8)?,
            Marker::FixExt16 => self.extension(16)?,
            Marker::Ext8 => self.length(1).and_then(|length| self.extension(length))?,
            Marker::Ext16 => self.length(2).and_then(|length| self.extension(length))?,
            Marker::Ext32 => self.length(4).and_then(|length| self.extension(length))?,
            Marker::Reserved => return Err(WireError::Garbled(byte)),
        })
    }

    /// Passes over what follows a token that has entries.
    fn skip_entries(&mut self, token: &Token<'_>, depth: usize) -> Result<(), WireError> {
        let entries = match token {
            Token::List(count) => u64::from(*count),
            Token::Map(count) => 2 * u64::from(*count),
            _ => return Ok(()),
        };
        if depth == MAX_DEPTH {
            return Err(WireError::Deep);
        }
        for _ in 0..entries {
            let token = self.next()?;
            self.skip_entries(&token, depth + 1)?;
        }
        Ok(())
    }
}

/// The named values of a message.
///
/// Values that are nil are left out. Names that occur twice have their last value.
pub fn decode(message: &[u8]) -> Result<NamedValues, WireError> {
    let mut unread = MessageRest(message);
    let count = match unread.next()? {
        Token::Map(count) => count,
        other => return Err(WireError::NoMap(other.kind())),
    };
    if count > MAX_ENTRIES {
        return Err(WireError::Entries(count));
    }
    let mut named = NamedValues::new();
    entries(&mut unread, count, &[], &mut named)?;
    match unread.0.len() {
        0 => Ok(named),
        rest => Err(WireError::Trailing(rest)),
    }
}

/// Takes the entries of a map that is found under these names, each in the one before it.
fn entries<'m>(
    unread: &mut MessageRest<'m>,
    count: u32,
    within: &[&'m str],
    named: &mut NamedValues,
) -> Result<(), WireError> {
    if count.saturating_add(named.len() as u32) > MAX_ENTRIES {
        return Err(WireError::Entries(count));
    }
    for _ in 0..count {
        let own = match unread.next()? {
            Token::Text(name) if name.len() > MAX_NAME_BYTES => return Err(WireError::Name(name.len())),
            Token::Text(name) => name,
            other => return Err(WireError::NoMap(other.kind())),
        };
        let path = [within, &[own]].concat();
        let refused = |problem: String| WireError::Value { name: path.join("/"), problem };
        let value = match unread.next()? {
            Token::Nil => continue,
            Token::Text(text) => Value::Text(text.to_owned()),
            Token::Integer(value) => Value::Integer(value),
            Token::Bool(value) => Value::Integer(value.into()),
            Token::Float(value) => scalar(value),
            Token::List(count) if count > MAX_LISTED => {
                return Err(refused(format!("a list of {count} items; send a NumPy array")));
            }
            Token::List(count) => list(unread, count)?
                .map_err(|found| refused(format!("a list with {found} in it; send a NumPy array")))?,
            Token::Map(count) => {
                let mut again = MessageRest(unread.0);
                match map(unread, count)? {
                    Some(value) => value.map_err(refused)?,
                    None if within.len() == MAX_NESTED => {
                        return Err(refused("maps nested deeper than policies use; send a flat map".into()));
                    }
                    None => {
                        entries(&mut again, count, &path, named)?;
                        continue;
                    }
                }
            }
            found @ (Token::Bytes(_) | Token::Extension) => {
                return Err(refused(format!("{}; send text, a number or a NumPy array", found.kind())));
            }
        };
        named.insert(path.join("/"), value);
    }
    Ok(())
}

fn scalar(value: f64) -> Value {
    listed(Vec::new(), vec![value as f32])
}

/// Numbers of Python's, which are of no type of NumPy's.
fn listed(shape: Vec<usize>, values: Vec<f32>) -> Value {
    Value::Numbers(Array { shape, values, dtype: "numbers" })
}

/// A list of numbers, or what is in it instead.
fn list(unread: &mut MessageRest<'_>, count: u32) -> Result<Result<Value, &'static str>, WireError> {
    let (mut values, mut other) = (Vec::new(), None);
    for _ in 0..count {
        match unread.next()? {
            Token::Integer(value) => values.push(value as f32),
            Token::Float(value) => values.push(value as f32),
            found => {
                unread.skip_entries(&found, 1)?;
                other = Some(found.kind());
            }
        }
    }
    let shape = vec![values.len()];
    Ok(other.map_or(Ok(listed(shape, values)), Err))
}

/// The parts of a map that stands for an array.
#[derive(Default)]
struct Parts<'m> {
    is_array: bool,
    is_scalar: bool,
    /// As the package msgpack-numpy marks arrays and scalars, which cannot read the answer.
    is_foreign: bool,
    data: Option<&'m [u8]>,
    number: Option<f64>,
    /// The number, if it is a whole one.
    integer: Option<i64>,
    dtype: Option<&'m str>,
    shape: Option<Vec<usize>>,
}

/// A map that stands for an array or a scalar of NumPy, or why it does not; none if it stands for neither.
fn map(unread: &mut MessageRest<'_>, count: u32) -> Result<Option<Result<Value, String>>, WireError> {
    let mut parts = Parts::default();
    for _ in 0..count {
        let key = match unread.next()? {
            Token::Text(key) => key.as_bytes(),
            Token::Bytes(key) => key,
            other => return Err(WireError::NoMap(other.kind())),
        };
        let token = unread.next()?;
        match (key, &token) {
            (b"__ndarray__", Token::Bool(yes)) => parts.is_array = *yes,
            (b"__npgeneric__", Token::Bool(yes)) => parts.is_scalar = *yes,
            (b"nd", Token::Bool(_)) => parts.is_foreign = true,
            (b"data", Token::Bytes(bytes)) => parts.data = Some(bytes),
            (b"data", Token::Integer(value)) => {
                (parts.number, parts.integer) = (Some(*value as f64), Some(*value));
            }
            (b"data", Token::Float(value)) => parts.number = Some(*value),
            (b"data", Token::Bool(value)) => parts.number = Some(f64::from(u8::from(*value))),
            (b"dtype", Token::Text(dtype)) => parts.dtype = Some(dtype),
            (b"shape", Token::List(axes)) if *axes <= MAX_AXES => {
                let axes = (0..*axes).map(|_| match unread.next()? {
                    Token::Integer(length) => Ok(usize::try_from(length).unwrap_or(usize::MAX)),
                    other => Err(WireError::NoMap(other.kind())),
                });
                parts.shape = Some(axes.collect::<Result<_, _>>()?);
                continue;
            }
            _ => {}
        }
        unread.skip_entries(&token, 1)?;
    }
    Ok(Some(match parts {
        Parts { is_foreign: true, data: Some(_), .. } => Err(FOREIGN.into()),
        Parts { is_scalar: true, integer: Some(integer), .. } => Ok(Value::Integer(integer)),
        Parts { is_scalar: true, number: Some(number), .. } => Ok(scalar(number)),
        Parts { is_array: true, data: Some(data), dtype: Some(dtype), shape: Some(shape), .. } => {
            array(data, dtype, shape)
        }
        Parts { is_array: true, .. } => Err("an array needs data, dtype and shape (at most 8 axes)".into()),
        Parts { is_scalar: true, .. } => Err("a NumPy scalar that is not a number".into()),
        _ => return Ok(None),
    }))
}

fn array(data: &[u8], dtype: &str, shape: Vec<usize>) -> Result<Value, String> {
    let (width, name) =
        element(dtype).ok_or_else(|| format!("unsupported dtype {dtype}; send uint8, float32 or float64"))?;
    let bytes = shape.iter().try_fold(width, |bytes, axis| bytes.checked_mul(*axis));
    if bytes != Some(data.len()) {
        return Err(format!("{} bytes are no array of shape {shape:?} and dtype {dtype}", data.len()));
    }
    Ok(match dtype {
        "|u1" => Value::bytes(shape, data.to_vec()),
        _ => Value::Numbers(Array { shape, values: numbers(data, dtype), dtype: name }),
    })
}

/// Bytes of an element, and its type's name; none for types that are not taken, those of objects among them.
fn element(dtype: &str) -> Option<(usize, &'static str)> {
    Some(match dtype {
        "|u1" => (1, "uint8"),
        "|i1" => (1, "int8"),
        "|b1" => (1, "bool"),
        "<u2" => (2, "uint16"),
        "<i2" => (2, "int16"),
        "<u4" => (4, "uint32"),
        "<i4" => (4, "int32"),
        "<f4" => (4, "float32"),
        "<u8" => (8, "uint64"),
        "<i8" => (8, "int64"),
        "<f8" => (8, "float64"),
        _ => return None,
    })
}

/// Little-endian numbers of a type that [`element`] knows, as float32.
fn numbers(data: &[u8], dtype: &str) -> Vec<f32> {
    fn each<const N: usize>(data: &[u8], number: impl Fn([u8; N]) -> f32) -> Vec<f32> {
        data.as_chunks::<N>().0.iter().map(|bytes| number(*bytes)).collect()
    }
    match dtype {
        "|i1" => each(data, |b| i8::from_le_bytes(b).into()),
        "<u2" => each(data, |b| u16::from_le_bytes(b).into()),
        "<i2" => each(data, |b| i16::from_le_bytes(b).into()),
        "<u4" => each(data, |b| u32::from_le_bytes(b) as f32),
        "<i4" => each(data, |b| i32::from_le_bytes(b) as f32),
        "<f4" => each(data, f32::from_le_bytes),
        "<u8" => each(data, |b| u64::from_le_bytes(b) as f32),
        "<i8" => each(data, |b| i64::from_le_bytes(b) as f32),
        "<f8" => each(data, |b| f64::from_le_bytes(b) as f32),
        _ => each(data, |b| u8::from_le_bytes(b).into()),
    }
}

/// The values of an answer, without its times.
#[cfg(test)]
pub fn decode_answer(message: &[u8]) -> NamedValues {
    let timing = b"\xadserver_timing";
    let at = message.windows(timing.len()).rposition(|name| name == timing).expect("answers end with it");
    let mut flat = message[..at].to_vec();
    // A map of fewer than 16 entries has their number in its first byte.
    flat[0] -= 1;
    decode(&flat).expect("a flat map")
}
