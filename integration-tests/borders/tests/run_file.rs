//! What is made from `configs/reference.yaml`, which has every key of a run file, and from the bounds of its
//! numbers: the page of keys, and the JSON schema that gives editors completion. With `COX_WRITE_DOCS=1`
//! these tests write both.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value, json};

/// Widest line of the page.
const COLUMNS: usize = 118;

fn path(of: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(of)
}

/// The least and the most that numbers may be, by key.
fn bounds() -> Map<String, Value> {
    let text = fs::read_to_string(path("docs/reference/run-file.bounds.json")).expect("the bounds of keys");
    serde_json::from_str(&text).expect("they are JSON")
}

/// One key of the run file, or a section.
struct Key {
    /// From the section down.
    path: Vec<String>,
    /// As it stands there; empty for what has keys below it.
    value: String,
    required: bool,
    /// The comments above it and behind it.
    says: String,
}

/// The comment at the top of the file, and all keys in their order.
fn keys() -> (String, Vec<Key>) {
    let text = fs::read_to_string(path("configs/reference.yaml")).expect("the run file with all keys");
    let (mut top, mut keys) = (String::new(), Vec::new());
    let (mut outer, mut above) = (Vec::<(usize, String)>::new(), Vec::<&str>::new());
    for line in text.lines() {
        let (stripped, indent) = (line.trim_start(), line.len() - line.trim_start().len());
        if let Some(comment) = stripped.strip_prefix('#') {
            above.push(comment.trim());
            continue;
        }
        let Some((key, rest)) = stripped.split_once(':') else {
            // A blank line: what was above it is about no key.
            top.push_str(&above.join(" "));
            above.clear();
            continue;
        };
        let (value, comment) = match rest.strip_prefix(" #") {
            Some(comment) => ("", comment),
            None => rest.split_once(" # ").unwrap_or((rest, "")),
        };
        let says = format!("{} {}", above.join(" "), comment.trim());
        above.clear();
        outer.retain(|(depth, _)| *depth < indent);
        outer.push((indent, key.to_owned()));
        keys.push(Key {
            path: outer.iter().map(|(_, key)| key.clone()).collect(),
            value: value.trim().to_owned(),
            required: says.contains("(required)"),
            says: says.replace("(required)", "").trim().to_owned(),
        });
    }
    (top, keys)
}

/// One paragraph, behind a bullet if there is one.
fn wrapped(bullet: &str, text: &str) -> String {
    let (mut out, mut line) = (String::new(), bullet.to_owned());
    let indent = " ".repeat(bullet.len());
    for word in text.split_whitespace() {
        let begun = !line.trim_start_matches(['-', ' ']).is_empty();
        if begun && line.chars().count() + 1 + word.chars().count() > COLUMNS {
            out.push_str(&format!("{line}\n"));
            line = format!("{indent}{word}");
        } else {
            line.push_str(if begun { " " } else { "" });
            line.push_str(word);
        }
    }
    format!("{out}{line}\n")
}

/// `from 1 to 1e12`; nothing where every number is taken.
fn range(bounds: &[Value; 2]) -> String {
    let number = |bound: &Value| match bound.as_f64() {
        Some(large) if large >= 1e10 => format!("{large:e}"),
        _ => bound.to_string(),
    };
    match bounds {
        [Value::String(above), Value::Null] => above.clone(),
        [Value::String(above), most] => format!("{above} to {}", number(most)),
        [least, Value::Null] if least.as_f64() == Some(0.0) => String::new(),
        [least, Value::Null] => format!("at least {}", number(least)),
        [least, most] => format!("from {} to {}", number(least), number(most)),
    }
}

/// The bounds of a key, if it has some.
fn bounds_of(key: &str, bounds: &Map<String, Value>) -> Option<[Value; 2]> {
    serde_json::from_value(bounds.get(key)?.clone()).ok()
}

fn page() -> String {
    let ((top, keys), bounds) = (keys(), bounds());
    let mut page = String::from("# Run file\n\n<!-- Made from configs/reference.yaml by ");
    page.push_str("`COX_WRITE_DOCS=1 cargo test -p coxswain-borders --test run_file`. -->\n\n");
    page.push_str(&wrapped("", &top));
    page.push_str("\nEditors complete and explain keys by the [schema](run-file.schema.json): put\n");
    page.push_str(
        "`# yaml-language-server: $schema=PATH/run-file.schema.json` into a run file's first line.\n",
    );
    for Key { path, value, required, says } in &keys {
        let says = says.replace('<', "&lt;");
        let name = path.join(".");
        if path.len() == 1 {
            page.push_str(&format!("\n## {name}\n\n"));
            if !says.is_empty() {
                page.push_str(&format!("{}\n", wrapped("", &says)));
            }
            continue;
        }
        let default = match (&**value, required) {
            ("", _) => String::new(),
            ("null", _) => " (no default)".to_owned(),
            (value, true) => format!(" (required; for instance `{value}`)"),
            (value, false) => format!(" (default `{value}`)"),
        };
        let range = bounds_of(&name, &bounds).map(|of| range(&of)).filter(|range| !range.is_empty());
        let default = match (range, default.strip_suffix(')')) {
            (None, _) => default,
            (Some(range), Some(open)) => format!("{open}; {range})"),
            (Some(range), None) => format!(" ({range})"),
        };
        let colon = if says.is_empty() { "" } else { ": " };
        page.push_str(&wrapped("- ", &format!("`{name}`{default}{colon}{says}")));
    }
    page
}

/// What a value tells of its type. A word or a list may be another shape as well, and is left to `cox check`.
fn typed(key: &Key) -> Map<String, Value> {
    let mut schema = Map::new();
    if !key.says.is_empty() {
        schema.insert("description".into(), json!(key.says));
    }
    let number = key.value.parse::<f64>().ok();
    let kind = match &*key.value {
        "true" | "false" => Some("boolean"),
        value if value.parse::<i64>().is_ok() => Some("integer"),
        _ => number.map(|_| "number"),
    };
    if let Some(kind) = kind {
        let kinds = if key.required { json!(kind) } else { json!([kind, "null"]) };
        schema.insert("type".into(), kinds);
    }
    if !key.required && !key.value.is_empty() {
        let default =
            serde_json::from_str(&key.value).unwrap_or_else(|_| json!(key.value.trim_matches('\'')));
        schema.insert("default".into(), default);
    }
    schema
}

/// The schema lists the keys of the engine and of its own task; another task's are no error to it.
fn schema() -> String {
    let mut root = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A run file of Coxswain",
        "type": "object",
        "properties": {},
    });
    let bounds = bounds();
    for key in keys().1 {
        let (last, sections) = key.path.split_last().expect("a key has a name");
        let mut at = &mut root;
        for section in sections {
            at = &mut at["properties"][section];
        }
        if at["properties"].is_null() {
            (at["type"], at["properties"]) = (json!(["object", "null"]), json!({}));
        }
        if key.required {
            let names = at["required"].as_array().cloned().unwrap_or_default();
            at["required"] = names.into_iter().chain([json!(last)]).collect();
        }
        let mut schema = typed(&key);
        if let Some(ends) = bounds_of(&key.path.join("."), &bounds) {
            let [least, most] = ends;
            let least = if least.is_string() { ("exclusiveMinimum", json!(0)) } else { ("minimum", least) };
            let named = [least, ("maximum", most)].map(|(name, end)| (name.to_owned(), end));
            let ends: Map<_, _> = named.into_iter().filter(|(_, end)| !end.is_null()).collect();
            // What may be a list or a map has the bounds for each of its numbers.
            if !schema.contains_key("type") && !ends.is_empty() {
                schema.insert("items".into(), json!(ends));
                schema.insert("additionalProperties".into(), json!(ends));
            }
            schema.extend(ends);
        }
        at["properties"][last] = Value::Object(schema);
    }
    for (key, kind, says) in [
        ("sections", "object", "Several runs: by name, what each has of its own over the rest of the file."),
        ("section", "string", "The one of `sections` that is meant without --section."),
    ] {
        root["properties"][key] = json!({"type": [kind, "null"], "description": says});
    }
    format!("{root:#}\n")
}

fn assert_made(file: &str, made: &str) {
    if std::env::var_os("COX_WRITE_DOCS").is_some() {
        fs::write(path(file), made).expect("docs can be written");
    }
    let there = fs::read_to_string(path(file)).unwrap_or_default();
    let remedy = "`COX_WRITE_DOCS=1 cargo test -p coxswain-borders --test run_file` writes it";
    assert!(there == made, "{file} is not what configs/reference.yaml says: {remedy}");
}

#[test]
fn the_page_of_keys_is_what_the_run_file_with_all_keys_says() {
    assert_made("docs/reference/run-file.md", &page());
}

#[test]
fn the_schema_is_what_the_run_file_with_all_keys_says() {
    assert_made("docs/reference/run-file.schema.json", &schema());
}

#[test]
fn no_key_of_the_run_file_is_without_a_place() {
    let (_, keys) = keys();
    assert!(keys.len() > 80, "only {} keys were read", keys.len());
    let sections = keys.iter().filter(|key| key.path.len() == 1).count();
    assert!(sections > 8, "only {sections} sections were read");
}
