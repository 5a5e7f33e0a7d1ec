//! One key with several values: `cox plan --vary lora.rank=8,16,32`.

use super::{Outlook, Question};

/// A key and its values, as the command line gives them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vary {
    /// `section.key`.
    pub key: String,
    /// Each as it would stand in a run file.
    pub values: Vec<String>,
}

/// A run with one of the values, in each memory.
pub struct Variant {
    /// The value.
    pub value: String,
    /// The run with it.
    pub question: Question,
    /// One for each memory.
    pub outlooks: Vec<Outlook>,
}

impl Vary {
    /// From `section.key=value,value,...`. A comma in brackets belongs to a value.
    pub fn parse(text: &str) -> Result<Self, String> {
        let expected = || format!("{text}: expected section.key=value,value,...");
        let (key, values) = text.split_once('=').ok_or_else(expected)?;
        let mut depth = 0;
        let separates = |letter: char| {
            depth += i32::from(matches!(letter, '[' | '{')) - i32::from(matches!(letter, ']' | '}'));
            letter == ',' && depth == 0
        };
        let values: Vec<_> = values.split(separates).map(|value| value.trim().to_owned()).collect();
        match key.is_empty() || values.iter().any(String::is_empty) {
            true => Err(expected()),
            false => Ok(Self { key: key.to_owned(), values }),
        }
    }

    /// What is laid over the run file, a change for each value.
    pub fn changes(&self) -> impl Iterator<Item = (&str, String)> {
        self.values.iter().map(|value| (value.as_str(), format!("{}={value}", self.key)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_parted_by_commas_outside_of_brackets() {
        let vary = Vary::parse("model.train=[a, b],[],{c: [d, e]}").unwrap();
        assert_eq!(
            (vary.key.as_str(), &vary.values[..]),
            ("model.train", &["[a, b]", "[]", "{c: [d, e]}"].map(String::from)[..])
        );
        for wrong in ["lora.rank", "=1,2", "lora.rank=", "lora.rank=8,,16"] {
            assert!(Vary::parse(wrong).is_err(), "{wrong}");
        }
    }
}
