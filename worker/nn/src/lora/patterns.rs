//! A map whose order means something: PEFT asks the patterns of `rank_pattern` and `alpha_pattern` in the
//! order in which they are written, and the first that matches a module decides.
//!
//! A sorted map would answer `{"self_attn.q_proj": 4, "q_proj": 16}` with 16 for every module.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{MapAccess, Visitor},
};

/// Module-name patterns with a value each, in the order of the file.
#[derive(Clone, Debug, PartialEq)]
pub struct Patterns<V>(Vec<(String, V)>);

impl<V> Patterns<V> {
    /// Pattern and value, the one that is asked first in front.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &V)> {
        self.0.iter().map(|(pattern, value)| (pattern.as_str(), value))
    }
}

impl<V> Default for Patterns<V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<V> FromIterator<(String, V)> for Patterns<V> {
    fn from_iter<I: IntoIterator<Item = (String, V)>>(entries: I) -> Self {
        Self(entries.into_iter().collect())
    }
}

impl<V: Serialize> Serialize for Patterns<V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Patterns<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(InOrder(PhantomData))
    }
}

/// Takes entries as they come. Keys that stand twice have been refused by the parser of the text.
struct InOrder<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for InOrder<V> {
    type Value = Patterns<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of module-name patterns")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::with_capacity(map.size_hint().unwrap_or(0).min(64));
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Patterns(entries))
    }
}
