//! Fields of a record, by the kind of its file.
//!
//! ```text
//! .jsonl .ndjson .json    an object a line; texts, or numbers and truth values as they are written
//! .csv                    RFC 4180: a header, commas, quotes around what has commas, quotes or line breaks
//! .tsv                    a header, tabs; quotes are letters like others
//! ```

use std::path::Path;

use coxswain_data::{DataError, text::excerpt};
use serde_json::Value;

use crate::{
    found::first_line,
    tokens::lines::{AtFault, Lines},
};

/// A text, and what is to be written for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pair {
    /// Without a prefix.
    pub source: String,
    /// Never blank.
    pub target: String,
}

impl Pair {
    /// Refused if there is nothing to learn from it; `column` is where that is missing.
    pub fn checked(self, column: &str) -> Result<Self, String> {
        if self.target.trim().is_empty() {
            return Err(format!("has an empty `{column}`; write the target text, or remove the pair"));
        }
        Ok(self)
    }
}

/// Names that an error lists.
const LISTED: usize = 16;

/// How a file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileKind {
    Json,
    Comma,
    Tab,
}

impl FileKind {
    fn from_path(path: &Path) -> Result<Self, DataError> {
        match path.extension().and_then(|ending| ending.to_str()) {
            Some("jsonl" | "ndjson" | "json") => Ok(Self::Json),
            Some("csv") => Ok(Self::Comma),
            Some("tsv") => Ok(Self::Tab),
            _ => Err(DataError::invalid(
                path,
                "(name)",
                "does not end with .jsonl, .csv or .tsv",
                "name a file of one of these kinds in data.path",
            )),
        }
    }
}

/// The columns of a file, or the fields of its first object that hold texts; none if it is no such file.
pub fn columns(path: &Path) -> Option<Vec<String>> {
    let (kind, line) = (FileKind::from_path(path).ok()?, first_line(path)?);
    if kind != FileKind::Json {
        let header = fields(kind, &line).ok()?;
        return Some(header.iter().map(|name| name.trim().to_owned()).collect());
    }
    let Value::Object(record) = serde_json::from_str(&line).ok()? else { return None };
    Some(record.into_iter().filter(|(_, value)| value.is_string()).map(|(name, _)| name).collect())
}

/// A file of records, and which of their fields make a pair.
pub struct Table {
    lines: Lines,
    kind: FileKind,
    columns: [String; 2],
    header: Header,
}

/// The first record of a file that is no JSON.
#[derive(Clone, Copy, Default)]
struct Header {
    /// Where the columns are.
    places: [usize; 2],
    /// How many there are.
    fields: usize,
}

impl Table {
    /// Reads the whole file once, and every pair of it.
    pub fn read_file(path: &Path, columns: [&str; 2]) -> Result<Self, DataError> {
        Self::scan(path, columns, &mut Err)
    }

    /// Every record that this refuses.
    pub fn faults(path: &Path, columns: [&str; 2]) -> Vec<DataError> {
        let mut faults = Vec::new();
        let ended = Self::scan(path, columns, &mut |fault| {
            faults.push(fault);
            Ok(())
        });
        let ended = ended.err();
        faults.extend(ended);
        faults
    }

    fn scan(path: &Path, columns: [&str; 2], at_fault: &mut AtFault<'_>) -> Result<Self, DataError> {
        let kind = FileKind::from_path(path)?;
        let columns = columns.map(str::to_owned);
        let mut header = (kind == FileKind::Json).then_some(Header::default());
        let mut quotes = Quotes::default();
        let open = |line: &[u8]| kind == FileKind::Comma && quotes.are_open_after(line);
        let lines = Lines::scan_joined(path, open, |line, text| {
            let refuse = |fault| DataError::Line { path: path.into(), line, fault };
            let Some(header) = header else {
                let names = fields(kind, text).map_err(refuse)?;
                let places = places(&names, &columns).map_err(refuse)?;
                header = Some(Header { places, fields: names.len() });
                return Ok(());
            };
            let read = pair(kind, text, &Columns { names: &columns, header });
            read.map(drop).map_err(refuse).or_else(&mut *at_fault)
        })?;
        Ok(Self { lines, kind, columns, header: header.unwrap_or_default() })
    }

    /// Records, without a header.
    pub fn len(&self) -> u64 {
        self.lines.len().saturating_sub(self.headers())
    }

    /// Pair `index`.
    pub fn pair(&self, index: u64) -> Result<Pair, DataError> {
        let text = self.lines.line(index + self.headers())?;
        let columns = Columns { names: &self.columns, header: self.header };
        pair(self.kind, &text, &columns).map_err(|fault| self.fault(index, fault))
    }

    /// The error of a pair, with its line.
    pub fn fault(&self, index: u64, fault: String) -> DataError {
        let line = self.lines.number(index + self.headers());
        DataError::Line { path: self.lines.path().into(), line, fault }
    }

    /// The file.
    pub fn lines(&self) -> &Lines {
        &self.lines
    }

    fn headers(&self) -> u64 {
        u64::from(self.kind != FileKind::Json)
    }
}

/// The two columns.
struct Columns<'a> {
    names: &'a [String; 2],
    header: Header,
}

fn places(header: &[String], columns: &[String; 2]) -> Result<[usize; 2], String> {
    if header.first().is_some_and(|first| first.starts_with("sep=")) {
        return Err(
            "is the line `sep=` of a spreadsheet; remove it: columns are named in the first line".into()
        );
    }
    let place = |column: &String| {
        let mut found = header.iter().enumerate().filter(|(_, name)| name.trim() == column);
        let (found, twice) = (found.next().map(|(place, _)| place), found.next().is_some());
        if twice {
            return Err(format!("has two columns `{column}`; rename one of them"));
        }
        if let [only] = header {
            let separated = |by: char| only.contains(by);
            if separated(';') {
                return Err(
                    "has fields separated by semicolons; separate them by commas or tabs (.tsv)".into()
                );
            }
            // A file of the other ending: of its own, this separator would have made two fields.
            for (by, named, ending) in [('\t', "tabs", ".tsv"), (',', "commas", ".csv")] {
                if separated(by) {
                    return Err(format!("has fields separated by {named}; rename it to end with {ending}"));
                }
            }
        }
        found.ok_or_else(|| {
            let there = listed(header.iter().map(String::as_str));
            format!("has no column `{column}`; name two of {there} in data.source and data.target")
        })
    };
    Ok([place(&columns[0])?, place(&columns[1])?])
}

/// The first of these names, for errors.
fn listed<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let others = names.len().saturating_sub(LISTED);
    let shown: Vec<_> = names.take(LISTED).map(|name| format!("`{}`", excerpt(name))).collect();
    let others = if others > 0 { format!(" and {others} others") } else { String::new() };
    shown.join(", ") + &others
}

fn pair(kind: FileKind, text: &str, columns: &Columns<'_>) -> Result<Pair, String> {
    let Columns { names, header } = columns;
    if kind == FileKind::Json {
        let record: Value = serde_json::from_str(text).map_err(|error| {
            format!("is not JSON: {error}; write one pair a line, for instance with `jq -c .`")
        })?;
        if !record.is_object() {
            return Err("is not a JSON object; write one pair a line, for instance with `jq -c '.[]'`".into());
        }
        let [source, target] = names.each_ref().map(|name| field(&record, name));
        return Pair { source: source?, target: target? }.checked(&names[1]);
    }
    let fields = fields(kind, text)?;
    if fields.len() > header.fields {
        let remedy = match kind {
            FileKind::Comma => "put quotes around a text that contains a comma",
            FileKind::Json | FileKind::Tab => "replace tabs within a text with spaces",
        };
        return Err(format!("has {} fields, but the header has {}; {remedy}", fields.len(), header.fields));
    }
    let [source, target] = [0, 1].map(|column| {
        let field = fields.get(header.places[column]).cloned();
        field.ok_or_else(|| {
            format!(
                "has {} field{}, but `{}` is field {} of the header; complete the record",
                fields.len(),
                if fields.len() == 1 { "" } else { "s" },
                names[column],
                header.places[column] + 1
            )
        })
    });
    Pair { source: source?, target: target? }.checked(&names[1])
}

/// A field of an object as text.
fn field(record: &Value, column: &str) -> Result<String, String> {
    match record.get(column) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(value @ (Value::Number(_) | Value::Bool(_))) => Ok(value.to_string()),
        Some(other) => Err(format!("`{column}` is {}; write a text", excerpt(&other.to_string()))),
        None => {
            let there: Vec<_> = record.as_object().into_iter().flat_map(|all| all.keys()).collect();
            let there = listed(there.into_iter().map(String::as_str));
            Err(format!(
                "has no `{column}`, only [{there}]; add it, or name the fields in data.source and data.target"
            ))
        }
    }
}

/// The fields of a record that is no JSON.
fn fields(kind: FileKind, text: &str) -> Result<Vec<String>, String> {
    let text = text.strip_suffix('\n').unwrap_or(text);
    let text = text.strip_suffix('\r').unwrap_or(text);
    match kind {
        FileKind::Comma => comma_separated(text),
        FileKind::Json | FileKind::Tab => Ok(text.split('\t').map(str::to_owned).collect()),
    }
}

/// Where one is in a file of fields that are separated by commas, as [`comma_separated`] reads it: quotes
/// count only where a field begins with one, and a quote in quotes is written twice.
#[derive(Clone, Copy, Default, PartialEq)]
enum Quotes {
    #[default]
    RecordBegins,
    FieldBegins,
    Unquoted,
    Quoted,
    /// Behind a quote that ends the field, or is the first of two.
    Closed,
}

impl Quotes {
    /// Whether the record goes on behind this line.
    fn are_open_after(&mut self, line: &[u8]) -> bool {
        for byte in line {
            *self = match (*self, byte) {
                (Self::Quoted, b'"') => Self::Closed,
                (Self::Quoted, _) => Self::Quoted,
                (Self::RecordBegins | Self::FieldBegins | Self::Closed, b'"') => Self::Quoted,
                (_, b',') => Self::FieldBegins,
                (_, b'\n') => Self::RecordBegins,
                // The bytes of a mark that some programs begin a file with.
                (Self::RecordBegins, 0xef | 0xbb | 0xbf) => Self::RecordBegins,
                _ => Self::Unquoted,
            };
        }
        *self == Self::Quoted
    }
}

fn comma_separated(text: &str) -> Result<Vec<String>, String> {
    let mut fields = Vec::new();
    let mut rest = text;
    loop {
        let (field, after) = match rest.strip_prefix('"') {
            Some(quoted) => unquoted(quoted)?,
            None => {
                let end = rest.find(',').unwrap_or(rest.len());
                (rest[..end].to_owned(), &rest[end..])
            }
        };
        fields.push(field);
        match after.strip_prefix(',') {
            Some(next) => rest = next,
            None if after.is_empty() => return Ok(fields),
            None => {
                let found: String = after.chars().take(8).collect();
                return Err(format!(
                    "has `{found}` after a closing quote; write a quote inside quotes as two quotes"
                ));
            }
        }
    }
}

/// A field up to its closing quote, and what is behind that.
fn unquoted(quoted: &str) -> Result<(String, &str), String> {
    let mut field = String::new();
    let mut rest = quoted;
    loop {
        let Some(end) = rest.find('"') else {
            return Err(
                "has a quote that is never closed; close it, or write a quote inside quotes as two quotes"
                    .into(),
            );
        };
        field.push_str(&rest[..end]);
        rest = &rest[end + 1..];
        match rest.strip_prefix('"') {
            Some(more) => {
                field.push('"');
                rest = more;
            }
            None => return Ok((field, rest)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, text: &str) -> Result<Vec<(u64, String, String)>, String> {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(name);
        std::fs::write(&path, text).expect("a file");
        let table = Table::read_file(&path, ["source", "target"]).map_err(|error| error.to_string())?;
        let rows = (0..table.len()).map(|index| {
            let Pair { source, target } = table.pair(index).expect("it was looked at");
            (table.lines().number(index + table.headers()), source, target)
        });
        Ok(rows.collect())
    }

    #[test]
    fn three_kinds_of_files_give_the_same_pairs() {
        let pairs = vec![(2, "a, \"b\"".into(), "x".into()), (4, "c".into(), "3".into())];
        let csv = "\u{feff}id,source,target\r\n1,\"a, \"\"b\"\"\",x\r\n\r\n2,c,3\r\n";
        assert_eq!(read("t.csv", csv), Ok(pairs.clone()));
        assert_eq!(read("t.tsv", "target\tsource\nx\ta, \"b\"\n\n3\tc"), Ok(pairs.clone()));
        let json =
            "\n{\"source\": \"a, \\\"b\\\"\", \"target\": \"x\"}\n\n{\"source\": \"c\", \"target\": 3}\n";
        assert_eq!(read("t.jsonl", json), Ok(pairs));
    }

    #[test]
    fn a_quoted_field_may_go_on_over_lines_and_records_behind_it_keep_their_numbers() {
        let found = read("t.csv", "source,target\n\"one\ntwo\n\",x\nthree,y\n").expect("sound");
        assert_eq!(found, [(2, "one\ntwo\n".into(), "x".into()), (5, "three".into(), "y".into())]);
    }

    #[test]
    fn a_quote_within_a_field_is_a_letter() {
        let text = "source,target\na 5\" pipe,small pipe\nhello,world\nbye 6\" x,\"o\"\"k\"\n";
        let found = read("t.csv", text).expect("sound");
        let pairs = [(2, "a 5\" pipe", "small pipe"), (3, "hello", "world"), (4, "bye 6\" x", "o\"k")];
        assert_eq!(found, pairs.map(|(line, source, target)| (line, source.into(), target.into())));
    }

    #[test]
    fn a_header_of_megabytes_is_not_repeated() {
        let (long, many) = ("x".repeat(1 << 20), "x,".repeat(1 << 20));
        for header in [long, many] {
            let message = read("t.csv", &format!("{header}\na,b\n")).expect_err("no such column");
            assert!(message.len() < 1000 && message.contains("data.source"), "{} letters", message.len());
        }
        let ends_twice = read("t.csv", "source,target\r\r\na,b\r\r\n").expect("names are trimmed");
        assert_eq!(ends_twice.len(), 1);
    }

    #[test]
    fn what_cannot_be_used_is_refused_with_line_and_remedy() {
        for (name, text, told) in [
            (
                "t.csv",
                "source,target,target\na,b,c\n",
                "t.csv:1: has two columns `target`; rename one of them",
            ),
            ("t.csv", "source;target\na;b\n", "t.csv:1: has fields separated by semicolons; separate them"),
            ("t.csv", "source\ttarget\na\tb\n", "t.csv:1: has fields separated by tabs; rename it to end"),
            ("t.tsv", "source,target\na,b\n", "t.tsv:1: has fields separated by commas; rename it to end"),
            (
                "t.csv",
                "sep=,\nsource,target\na,b\n",
                "t.csv:1: is the line `sep=` of a spreadsheet; remove it",
            ),
            (
                "t.csv",
                "sep=;\nsource;target\na;b\n",
                "t.csv:1: is the line `sep=` of a spreadsheet; remove it",
            ),
            ("t.csv", "source,target\ra,b\r", "t.csv:1: has lines that end with CR alone; write LF"),
            ("t.tsv", "source\ttarget\na\tb\tc\n", "the header has 2; replace tabs within a text"),
            ("t.jsonl", "[{\"source\": \"a\"}]\n", "t.jsonl:1: is not a JSON object; write one pair a line"),
            (
                "t.csv",
                "source,label\na,b\n",
                "t.csv:1: has no column `target`; name two of `source`, `label`",
            ),
            (
                "t.csv",
                "source,target\na,b\na\n",
                "t.csv:3: has 1 field, but `target` is field 2 of the header",
            ),
            (
                "t.csv",
                "source,target\na,b,c\n",
                "t.csv:2: has 3 fields, but the header has 2; put quotes around a text that contains a comma",
            ),
            ("t.csv", "source,target\n\"a,b\n", "t.csv:2: has a quote that is never closed"),
            ("t.csv", "source,target\n\"a\"b,c\n", "t.csv:2: has `b,c` after a closing quote"),
            ("t.tsv", "source\ttarget\na\t \n", "t.tsv:2: has an empty `target`"),
            ("t.jsonl", "{\"source\": \"a\"}\n", "t.jsonl:1: has no `target`, only [`source`]"),
            ("t.jsonl", "{\"source\": [1], \"target\": \"b\"}\n", "t.jsonl:1: `source` is [1]; write a text"),
            ("t.jsonl", "source\n", "t.jsonl:1: is not JSON"),
            ("t.parquet", "x", "does not end with .jsonl, .csv or .tsv"),
        ] {
            let message = read(name, text).expect_err(told);
            assert!(message.contains(told), "{message}");
        }
    }
}
