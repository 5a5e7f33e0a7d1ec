//! A serde deserializer over the tree that knows where it is.
//!
//! An error takes the place and dotted path of the innermost node it passes on its way out. Unknown keys of a
//! struct are noted and skipped, so that all of them are reported together with whatever stops the reading.

use std::{cell::RefCell, fmt, marker::PhantomData};

use serde::{
    Deserialize,
    de::{self, IntoDeserializer, Visitor, value::StrDeserializer},
    forward_to_deserialize_any,
};

use super::{
    error::{ConfigError, Place, Problem},
    keys::{self, join},
    overrides,
    scalar::{self, boolean, boolean_meant, float, octal_elsewhere, whole_number_meant},
    tree::{MapKey, Node, Value},
};

/// Reads a `T` from the tree. All unknown keys are reported, and the first value that does not fit.
pub(super) fn from_tree<T: for<'de> Deserialize<'de>>(root: &Node) -> Result<T, ConfigError> {
    let Reading { value, unknown } = read(root);
    let known = keys::known_keys::<T>();
    let mut problems: Vec<_> = unknown.iter().map(|key| key.problem(&known)).collect();
    match value {
        Ok(value) if problems.is_empty() => return Ok(value),
        Ok(_) => {}
        Err(problem) => problems.push(problem),
    }
    Err(ConfigError::Invalid(problems))
}

/// What became of reading a tree as one type.
pub(super) struct Reading<T> {
    /// The value, or the first that does not fit; unknown keys do not keep it from being read.
    pub(super) value: Result<T, Problem>,
    /// Keys that the type does not have, as far as it was read.
    pub(super) unknown: Vec<UnknownKey>,
}

/// Reads a `T` from the tree, for a caller that decides what unknown keys mean.
pub(super) fn read<T: for<'de> Deserialize<'de>>(root: &Node) -> Reading<T> {
    let unknown = RefCell::new(Vec::new());
    let reader = Reader { node: root, path: String::new(), unknown: &unknown };
    let value = reader.read(PhantomData::<T>).map_err(|error| *error.0);
    Reading { value, unknown: unknown.into_inner() }
}

/// A key that a type does not have.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct UnknownKey {
    pub(super) place: Place,
    pub(super) section: String,
    pub(super) key: String,
    /// The keys that the type has there.
    pub(super) fields: Vec<&'static str>,
}

impl UnknownKey {
    pub(super) fn path(&self) -> String {
        join(&self.section, &self.key)
    }

    /// As a complaint, where `known` are all keys there are.
    pub(super) fn problem(&self, known: &[String]) -> Problem {
        let help = keys::suggestion(&self.section, &self.key, &self.fields, known);
        Problem::new(self.path(), "unknown key").at(&self.place).help(help)
    }
}

/// A problem that may not know its place yet.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct ReadError(Box<Problem>);

impl ReadError {
    fn located(mut self, place: &Place, path: &str) -> Self {
        if self.0.place.is_none() {
            self.0.place = Some(place.clone());
            self.0.path = match self.0.path.as_str() {
                "" => path.to_owned(),
                missing => join(path, missing),
            };
        }
        self
    }
}

impl de::Error for ReadError {
    fn custom<M: fmt::Display>(message: M) -> Self {
        Self(Box::new(Problem::new("", message.to_string())))
    }

    fn missing_field(field: &'static str) -> Self {
        Self(Box::new(Problem::new(field, "this key is required and missing")))
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        let allowed = expected.iter().map(|v| format!("`{v}`")).collect::<Vec<_>>().join(", ");
        let problem = Problem::new("", format!("`{variant}` is not one of {allowed}"));
        let meant = keys::abbreviated(variant).filter(|meant| expected.contains(meant));
        let meant = meant.or_else(|| keys::closest(variant, expected.iter().copied()));
        Self(Box::new(match meant {
            Some(near) => problem.help(format!("did you mean `{near}`?")),
            None => problem,
        }))
    }
}

struct Reader<'a> {
    node: &'a Node,
    path: String,
    unknown: &'a RefCell<Vec<UnknownKey>>,
}

impl<'a> Reader<'a> {
    fn child(&self, node: &'a Node, key: &str) -> Self {
        Self { node, path: join(&self.path, key), unknown: self.unknown }
    }

    /// Reads a value and gives its error this node's place, unless a deeper one has been named.
    fn read<T: de::DeserializeSeed<'a>>(self, seed: T) -> Result<T::Value, ReadError> {
        let (place, path) = (&self.node.place, self.path.clone());
        seed.deserialize(self).map_err(|error| error.located(place, &path))
    }

    fn plain(&self) -> Option<&'a str> {
        match &self.node.value {
            Value::Scalar { text, plain: true } if !self.node.is_null() => Some(text),
            _ => None,
        }
    }

    fn mismatch(&self, expected: &str) -> ReadError {
        let found = match &self.node.value {
            _ if self.node.is_null() => "nothing".to_owned(),
            Value::Scalar { text, plain: true } => format!("`{text}`"),
            Value::Scalar { text, plain: false } => format!("the text `{text}` in quotation marks"),
            Value::List(_) => "a list".to_owned(),
            Value::Map(_) => "a map".to_owned(),
        };
        de::Error::custom(format!("expected {expected}, found {found}"))
    }

    /// A map or a list in an override may be text that is not quoted.
    fn text_mismatch(&self) -> ReadError {
        let mut error = self.mismatch("text");
        if let Place::Override(given) = &self.node.place
            && !self.node.is_null()
        {
            error.0.help = overrides::quoted(given, &self.path);
        }
        error
    }

    /// One value where a list of such is expected.
    fn list_mismatch(&self) -> ReadError {
        let mut error = self.mismatch("a list");
        if let Value::Scalar { text, .. } = &self.node.value
            && !self.node.is_null()
        {
            error.0.help = Some(format!("write `[{}]`", scalar::in_list(text)));
        }
        error
    }

    fn whole<T: TryFrom<i128>>(&self, low: i128, high: i128) -> Result<T, ReadError> {
        let expected = || match (low, high) {
            (0, high) if high >= i128::from(u32::MAX) => self.mismatch("a whole number of at least 0"),
            _ => self.mismatch(&format!("a whole number from {low} to {high}")),
        };
        let text = self.plain().ok_or_else(expected)?;
        if let Some((octal, decimal)) = octal_elsewhere(text) {
            let choice = format!(
                "a whole number without leading zeros (`{decimal}`, or `{octal}` if octal was meant)"
            );
            return Err(self.mismatch(&choice));
        }
        let number: i128 = text.parse().map_err(|_| match whole_number_meant(text) {
            Some(meant) => self.mismatch(&format!("a whole number in digits (`{meant}`)")),
            None => expected(),
        })?;
        T::try_from(number).map_err(|_| expected())
    }

    fn map_entries(&self) -> Result<&'a [(MapKey, Node)], ReadError> {
        match &self.node.value {
            Value::Map(entries) => Ok(entries),
            _ if self.node.is_null() => Ok(&[]),
            _ => Err(self.mismatch("a map of keys")),
        }
    }

    fn note_unknown(&self, key: &MapKey, fields: &'static [&'static str]) {
        self.unknown.borrow_mut().push(UnknownKey {
            place: key.place.clone(),
            section: self.path.clone(),
            key: key.text.clone(),
            fields: fields.to_vec(),
        });
    }
}

macro_rules! whole_numbers {
    ($($method:ident $visit:ident $type:ty),* $(,)?) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
            visitor.$visit(self.whole(i128::from(<$type>::MIN), i128::from(<$type>::MAX))?)
        }
    )*};
}

impl<'de> de::Deserializer<'de> for Reader<'de> {
    type Error = ReadError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match &self.node.value {
            _ if self.node.is_null() => visitor.visit_unit(),
            Value::Scalar { text, plain: false } => visitor.visit_borrowed_str(text),
            Value::Scalar { text, plain: true } => match (boolean(text), text.parse::<i64>(), float(text)) {
                (Some(value), _, _) => visitor.visit_bool(value),
                (_, Ok(value), _) => visitor.visit_i64(value),
                (_, _, Some(value)) => visitor.visit_f64(value),
                _ => visitor.visit_borrowed_str(text),
            },
            Value::List(items) => visitor.visit_seq(Items { reader: &self, items: items.iter().enumerate() }),
            Value::Map(entries) => visitor.visit_map(Entries::new(&self, entries)),
        }
    }

    whole_numbers! {
        deserialize_u8 visit_u8 u8,
        deserialize_u16 visit_u16 u16,
        deserialize_u32 visit_u32 u32,
        deserialize_u64 visit_u64 u64,
        deserialize_i8 visit_i8 i8,
        deserialize_i16 visit_i16 i16,
        deserialize_i32 visit_i32 i32,
        deserialize_i64 visit_i64 i64,
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        let number = self.plain().and_then(float).ok_or_else(|| self.mismatch("a number"))?;
        visitor.visit_f64(number)
    }

    fn deserialize_f32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        self.deserialize_f64(visitor)
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        let expected = || match self.plain() {
            Some(text) => self.mismatch(boolean_meant(text)),
            None => self.mismatch("`true` or `false`"),
        };
        let value = self.plain().and_then(boolean).ok_or_else(expected)?;
        visitor.visit_bool(value)
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match &self.node.value {
            Value::Scalar { text, .. } if !self.node.is_null() => visitor.visit_borrowed_str(text),
            _ => Err(self.text_mismatch()),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        self.deserialize_str(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        if self.node.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match &self.node.value {
            Value::List(items) => visitor.visit_seq(Items { reader: &self, items: items.iter().enumerate() }),
            _ => Err(self.list_mismatch()),
        }
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, ReadError> {
        match &self.node.value {
            Value::List(items) if items.len() == len => {
                visitor.visit_seq(Items { reader: &self, items: items.iter().enumerate() })
            }
            Value::List(items) => {
                Err(de::Error::custom(format!("expected a list of {len} values, found {}", items.len())))
            }
            _ => Err(self.mismatch(&format!("a list of {len} values"))),
        }
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        visitor.visit_map(Entries::new(&self, self.map_entries()?))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        let entries = self.map_entries().map_err(|mut error| {
            // A value where its parts are to be given.
            if let (Value::Scalar { text, .. }, Some(first)) = (&self.node.value, fields.first()) {
                let names = fields.iter().map(|field| format!("`{field}`")).collect::<Vec<_>>().join(", ");
                let example = join(&self.path, first);
                error.0.help = Some(format!("its keys are {names}; as an override: `{example}={text}`"));
            }
            error
        })?;
        let (known, unknown): (Vec<_>, Vec<_>) =
            entries.iter().partition(|(key, _)| fields.contains(&key.text.as_str()));
        unknown.iter().for_each(|(key, _)| self.note_unknown(key, fields));
        visitor.visit_map(Entries::new(&self, known))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        match &self.node.value {
            Value::Scalar { text, .. } if !self.node.is_null() => {
                visitor.visit_enum(Choice { reader: &self, name: text, content: None })
            }
            Value::Map(entries) if entries.len() == 1 => {
                let (key, content) = &entries[0];
                visitor.visit_enum(Choice { reader: &self, name: &key.text, content: Some(content) })
            }
            _ => Err(self.mismatch("one name, or one name with its value (`name: value`)")),
        }
    }

    forward_to_deserialize_any! {
        i128 u128 char bytes byte_buf unit unit_struct newtype_struct tuple_struct identifier ignored_any
    }
}

struct Items<'r, 'a> {
    reader: &'r Reader<'a>,
    items: std::iter::Enumerate<std::slice::Iter<'a, Node>>,
}

impl<'a> de::SeqAccess<'a> for Items<'_, 'a> {
    type Error = ReadError;

    fn next_element_seed<T: de::DeserializeSeed<'a>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, ReadError> {
        self.items
            .next()
            .map(|(index, item)| self.reader.child(item, &index.to_string()).read(seed))
            .transpose()
    }

    fn size_hint(&self) -> Option<usize> {
        self.items.size_hint().1
    }
}

struct Entries<'r, 'a> {
    reader: &'r Reader<'a>,
    entries: std::vec::IntoIter<&'a (MapKey, Node)>,
    value: Option<&'a (MapKey, Node)>,
}

impl<'r, 'a> Entries<'r, 'a> {
    fn new(reader: &'r Reader<'a>, entries: impl IntoIterator<Item = &'a (MapKey, Node)>) -> Self {
        Self { reader, entries: entries.into_iter().collect::<Vec<_>>().into_iter(), value: None }
    }
}

impl<'a> de::MapAccess<'a> for Entries<'_, 'a> {
    type Error = ReadError;

    fn next_key_seed<K: de::DeserializeSeed<'a>>(&mut self, seed: K) -> Result<Option<K::Value>, ReadError> {
        self.value = self.entries.next();
        let Some((key, _)) = self.value else { return Ok(None) };
        let text: StrDeserializer<'_, ReadError> = key.text.as_str().into_deserializer();
        seed.deserialize(text)
            .map(Some)
            .map_err(|e| e.located(&key.place, &join(&self.reader.path, &key.text)))
    }

    fn next_value_seed<T: de::DeserializeSeed<'a>>(&mut self, seed: T) -> Result<T::Value, ReadError> {
        let (key, node) =
            self.value.take().ok_or_else(|| de::Error::custom("value asked for before its key"))?;
        self.reader.child(node, &key.text).read(seed)
    }
}

struct Choice<'r, 'a> {
    reader: &'r Reader<'a>,
    name: &'a str,
    content: Option<&'a Node>,
}

impl<'r, 'a> de::EnumAccess<'a> for Choice<'r, 'a> {
    type Error = ReadError;
    type Variant = Self;

    fn variant_seed<T: de::DeserializeSeed<'a>>(self, seed: T) -> Result<(T::Value, Self), ReadError> {
        let name: StrDeserializer<'_, ReadError> = self.name.into_deserializer();
        Ok((seed.deserialize(name)?, self))
    }
}

impl<'a> de::VariantAccess<'a> for Choice<'_, 'a> {
    type Error = ReadError;

    fn unit_variant(self) -> Result<(), ReadError> {
        match self.content {
            Some(node) if !node.is_null() => {
                Err(de::Error::custom(format!("`{0}` takes no value; write `{0}` alone", self.name)))
            }
            _ => Ok(()),
        }
    }

    fn newtype_variant_seed<T: de::DeserializeSeed<'a>>(self, seed: T) -> Result<T::Value, ReadError> {
        let node = self.content.ok_or_else(|| {
            <ReadError as de::Error>::custom(format!("`{0}` needs a value; write `{{{0}: 2}}`", self.name))
        })?;
        self.reader.child(node, self.name).read(seed)
    }

    fn tuple_variant<V: Visitor<'a>>(self, _len: usize, _visitor: V) -> Result<V::Value, ReadError> {
        Err(de::Error::custom("a list of values is not allowed here"))
    }

    fn struct_variant<V: Visitor<'a>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        let node =
            self.content.ok_or_else(|| <ReadError as de::Error>::custom("a map of keys is expected here"))?;
        de::Deserializer::deserialize_struct(self.reader.child(node, self.name), "", fields, visitor)
    }
}
