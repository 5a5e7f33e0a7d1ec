//! Episodes by their numbers: the keys `data.episodes`, `data.exclude_episodes` and `data.holdout_episodes`.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// One episode, or all from one to another: `7`, `10-19`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EpisodeRange {
    /// The first.
    pub first: u64,
    /// The last, which belongs to it.
    pub last: u64,
}

impl EpisodeRange {
    /// Whether an episode is in it.
    pub fn contains(&self, episode: u64) -> bool {
        (self.first..=self.last).contains(&episode)
    }
}

impl fmt::Display for EpisodeRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self { first, last } if first == last => write!(f, "{first}"),
            Self { first, last } => write!(f, "{first}-{last}"),
        }
    }
}

impl Serialize for EpisodeRange {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.first == self.last {
            serializer.serialize_u64(self.first)
        } else {
            serializer.collect_str(self)
        }
    }
}

impl<'de> Deserialize<'de> for EpisodeRange {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EpisodeRangeVisitor;

        impl de::Visitor<'_> for EpisodeRangeVisitor {
            type Value = EpisodeRange;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an episode number, or a range such as `10-19`")
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<EpisodeRange, E> {
                Ok(EpisodeRange { first: number, last: number })
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<EpisodeRange, E> {
                let number = u64::try_from(number);
                number.map_or_else(
                    |_| Err(E::custom("an episode number must be at least 0")),
                    |n| self.visit_u64(n),
                )
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<EpisodeRange, E> {
                let number = |text: &str| text.trim().parse::<u64>().ok();
                let ends = text.split_once('-').and_then(|(first, last)| number(first).zip(number(last)));
                match ends {
                    Some((first, last)) if first <= last => Ok(EpisodeRange { first, last }),
                    _ => Err(E::custom(format_args!(
                        "`{text}` is not a range of episodes; write FIRST-LAST, such as `10-19`"
                    ))),
                }
            }
        }

        deserializer.deserialize_any(EpisodeRangeVisitor)
    }
}

/// Most episodes that may be held out by name.
const MOST_HELD_OUT: usize = 1_000_000;

/// The numbers that ranges stand for: each episode by itself, in the order of the list.
///
/// # Errors
/// Where they are more than a million.
pub fn episode_numbers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<usize>, D::Error> {
    let mut all = Vec::new();
    for range in Vec::<EpisodeRange>::deserialize(deserializer)? {
        if range.last - range.first >= (MOST_HELD_OUT - all.len()) as u64 {
            let fault = format!("`{range}`: at most {MOST_HELD_OUT} episodes can be listed; name fewer");
            return Err(de::Error::custom(fault));
        }
        all.extend((range.first..=range.last).map(|episode| episode as usize));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    struct EpisodeNumbers(#[serde(deserialize_with = "episode_numbers")] Vec<usize>);

    #[test]
    fn ranges_stand_for_their_episodes_and_too_many_are_refused() {
        let held = |text: &str| serde_json::from_str::<EpisodeNumbers>(text).map(|held| held.0);
        assert_eq!(held(r#"[7, "2-4", "9-9"]"#).unwrap(), [7, 2, 3, 4, 9]);
        for text in [r#"["0-999999999999"]"#, r#"["0-999999", 7]"#, r#"["4-2"]"#, "[-1]"] {
            assert!(held(text).is_err(), "{text}");
        }
        assert_eq!(held(r#"["0-999999"]"#).unwrap().len(), MOST_HELD_OUT);
    }
}
