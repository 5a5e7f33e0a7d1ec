//! Which columns of numbers a policy takes and gives: the keys `data.state`, `data.action` and `data.sensor`.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// What is written where there is no state.
const NONE: &str = "none";

/// Features whose values are put side by side, in this order: a name, a list of names, or `none`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FeatureList(Vec<String>);

impl FeatureList {
    /// Names of the features.
    pub fn names(&self) -> &[String] {
        &self.0
    }

    /// The name of all of them together: of several the names with ` + ` between them.
    pub fn label(&self) -> String {
        self.0.join(" + ")
    }

    /// Whether it says `none`.
    pub fn is_none(&self) -> bool {
        self.0.is_empty()
    }
}

impl<T: Into<String>> From<T> for FeatureList {
    fn from(name: T) -> Self {
        Self(vec![name.into()])
    }
}

impl FromIterator<String> for FeatureList {
    fn from_iter<I: IntoIterator<Item = String>>(names: I) -> Self {
        Self(names.into_iter().collect())
    }
}

impl Serialize for FeatureList {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0[..] {
            [] => serializer.serialize_str(NONE),
            [name] => serializer.serialize_str(name),
            names => names.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for FeatureList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FeatureListVisitor;

        impl<'de> de::Visitor<'de> for FeatureListVisitor {
            type Value = FeatureList;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a feature's name, a list of names, or `none`")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<FeatureList, E> {
                Ok(FeatureList(if name == NONE { Vec::new() } else { vec![name.to_owned()] }))
            }

            fn visit_seq<A: de::SeqAccess<'de>>(self, mut items: A) -> Result<FeatureList, A::Error> {
                let mut names = Vec::new();
                while let Some(name) = items.next_element()? {
                    names.push(name);
                }
                match names.is_empty() {
                    true => Err(de::Error::custom("is empty; name a feature, or `none` for no state")),
                    false => Ok(FeatureList(names)),
                }
            }
        }

        deserializer.deserialize_any(FeatureListVisitor)
    }
}

/// A sensor's feature: its name where a frame has a window of readings, or `{key: ..., window: ...}` where it
/// has one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SensorFeature {
    /// The feature.
    pub key: String,
    /// Rows of the data set whose readings are a sample's window, its own the last; none where every row has
    /// a window of its own.
    pub window: Option<usize>,
}

impl From<&str> for SensorFeature {
    fn from(key: &str) -> Self {
        Self { key: key.to_owned(), window: None }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WindowedFeature {
    key: String,
    window: usize,
}

impl Serialize for SensorFeature {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.window {
            None => serializer.serialize_str(&self.key),
            Some(window) => WindowedFeature { key: self.key.clone(), window }.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for SensorFeature {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SensorFeatureVisitor;

        impl<'de> de::Visitor<'de> for SensorFeatureVisitor {
            type Value = SensorFeature;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a feature's name, or `{key: NAME, window: ROWS}`")
            }

            fn visit_str<E: de::Error>(self, key: &str) -> Result<SensorFeature, E> {
                Ok(key.into())
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<SensorFeature, A::Error> {
                let WindowedFeature { key, window } =
                    WindowedFeature::deserialize(de::value::MapAccessDeserializer::new(map))?;
                Ok(SensorFeature { key, window: Some(window) })
            }
        }

        deserializer.deserialize_any(SensorFeatureVisitor)
    }
}
