//! The words of the field, held by a machine: no private ones in names and comments, no comment wider than
//! the code, no two types of one name in a crate, no type that is a bare participle, adverb or pronoun.
//!
//! Exceptions are listed with the reason that they are right.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use coxswain_borders::{
    sources::Sources,
    text::{self, Kind, Piece},
    workspace,
};
use syn::{ImplItem, Item};

/// Columns of a line of comment; those of code are rustfmt's to hold.
const WIDTH: usize = 110;

/// Words of our own, each with the field's.
const OURS: [(&str, &str); 33] = [
    ("adjoint", "backward"),
    ("adjoints", "backward"),
    ("afford", "budget"),
    ("barren", "stalled"),
    ("blocked", "blockwise, or waiting"),
    ("books", "records, ledger"),
    ("brain", "simulated coordinator"),
    ("card", "GPU, device"),
    ("cards", "GPUs, devices"),
    ("crew", "worker group"),
    ("fabric", "transport"),
    ("fabrics", "transports"),
    ("felt", "measured, noticed"),
    ("keeper", "child process, store writer"),
    ("lever", "suggestion"),
    ("levers", "suggestions"),
    ("mirror", "replica"),
    ("mirrored", "replicated"),
    ("mirrors", "replicas"),
    ("onto", "residual"),
    ("outlet", "console writer"),
    ("poke", "wake"),
    ("pokes", "wakes"),
    ("said", "message, reported"),
    ("seat", "slot"),
    ("seats", "slots"),
    ("shadow", "meta"),
    ("sighted", "observed"),
    ("sightings", "snapshots"),
    ("truth", "calibration, reference"),
    ("turned", "rotated, rope"),
    ("voyage", "supervisor"),
    ("whoever", "the one that, any rank that"),
];
/// Words of [`OURS`] that are plain English in a sentence: names alone are looked at.
const ENGLISH: [&str; 7] = ["blocked", "books", "felt", "onto", "said", "turned", "truth"];
/// Words that whole names must not be: as parts of longer ones they are English.
const NAMES: [(&str, &str); 2] = [("turn", "cache_phase"), ("turns", "cache_phases")];

/// Phrases that had to be read twice where a user met them, each with what to say.
const PHRASES: [(&str, &str); 37] = [
    ("a stranger", "rejected a connection, with the reason"),
    ("are taken\"", "the maximum is, or are reserved"),
    ("asks for what", "has no effect"),
    ("began anew", "started over"),
    ("begin anew", "start over"),
    ("begins anew", "starts over"),
    ("beside the chat", "next to it, in the shard"),
    ("beside the file", "in the same directory"),
    ("beside this directory", "give the path"),
    ("brings it", "downloads it"),
    ("brings the rows", "copies the rows"),
    ("brings them", "downloads, or copies them"),
    ("broken off", "interrupted"),
    ("cannot be told", "is unknown"),
    ("computed otherwise", "computed differently"),
    ("cut otherwise", "split differently"),
    ("features kept", "features cached"),
    ("for want of", "because there is no"),
    ("goes on with it", "resumes it"),
    ("gone on from", "resumed from"),
    ("held against", "compared with, or blamed on"),
    ("is not known here", "is not supported"),
    ("is not uploaded", "could not be uploaded"),
    ("is read here", "is supported"),
    ("is there already", "already exists"),
    ("launch again to go on", "start again to resume"),
    ("launched again", "start it again to resume"),
    ("lie below", "are under, or in"),
    ("made itself known", "registered"),
    ("none that", "no ... can, or not a"),
    ("that is meant", "that is intended"),
    ("this comes back", "this happens again"),
    ("training goes on", "training continues"),
    ("turned away", "rejected"),
    ("what cannot be", "an invalid value"),
    ("what is there has", "it has"),
    ("would move", "would be learned"),
];

/// Words in "ed" that are nouns.
const NOUNS: [&str; 5] = ["embed", "feed", "need", "seed", "speed"];
/// Names of functions that say neither what is made nor what is read or taken, where many types have them.
const VAGUE: [&str; 5] = ["of", "open", "read", "report", "take"];
/// So many types of a crate may have a function of such a name. Those of traits do not count.
const MOST_OF_A_NAME: usize = 3;
/// Beginnings of doc comments that make one read backwards, or look for what is spoken of.
const BACKWARDS: [&str; 9] =
    ["As above", "By which", "Its ", "Likewise", "Of ", "That ", "The same", "Their ", "Those "];
/// Participles without "ed", adverbs and pronouns: they say what happened to a thing, or where it stands, and
/// not what it is. Gerunds are nouns.
#[rustfmt::skip]
const NO_NOUNS: [&str; 104] = [
    "about", "absent", "after", "again", "against", "ahead", "alone", "along", "among", "anew", "apart",
    "around", "aside", "asked", "at", "away", "before", "begun", "behind", "below", "beside", "between",
    "beyond", "both", "bound", "broken", "brought", "built", "chosen", "done", "drawn", "driven", "each",
    "every", "everything", "fallen", "forgotten", "found", "frozen", "given", "gone", "got", "grown",
    "heard", "held", "here", "hidden", "how", "kept", "known", "lent", "lies", "lost", "made", "met",
    "nobody", "none", "nothing", "now", "other", "others", "otherwise", "over", "own", "paid", "put",
    "said", "same", "seen", "sent", "shown", "since", "sold", "something", "sought", "spent", "spoken",
    "still", "such", "taken", "then", "there", "thought", "together", "told", "toward", "under", "unread",
    "unseen", "until", "unwritten", "upcoming", "what", "when", "where", "which", "who", "whole", "whose",
    "why", "within", "without", "won", "written",
];

/// An exception: places that begin like this, and why they are right.
type Exceptions = [(&'static str, &'static str)];

/// Names with words that are the field's where they stand.
const FIELDS_OWN: [(&str, &str); 0] = [];

#[test]
fn names_are_made_of_the_fields_words() {
    let mut found = Vec::new();
    for (file, source) in sources() {
        for piece in text::pieces(&source).into_iter().filter(|piece| piece.kind == Kind::Code) {
            let names = identifiers(piece.text);
            let ours = names.into_iter().filter_map(|name| Some((name, field_word(name)?)));
            found.extend(ours.map(|(name, word)| format!("{file}: {name} (say {word})")));
        }
    }
    let found: BTreeSet<_> = found.into_iter().collect();
    hold("has a word of our own in a name", found.into_iter().collect(), &FIELDS_OWN);
}

#[test]
fn comments_are_written_in_the_fields_words() {
    let mut found = Vec::new();
    for (file, source) in sources() {
        for (line, text) in comment_lines(&source) {
            let words = text.split(|c: char| !c.is_alphanumeric()).map(str::to_lowercase);
            let ours = |word: &String| OURS.iter().find(|(ours, _)| ours == word && !ENGLISH.contains(ours));
            let ours =
                words.filter_map(|word| ours(&word).map(|(ours, field)| format!("{ours} (say {field})")));
            found.extend(ours.map(|word| format!("{file}:{line}: {word}")));
        }
    }
    hold("has a word of our own in a comment", found, &[]);
}

#[test]
fn what_users_read_needs_one_reading() {
    let mut found = Vec::new();
    for (file, source) in sources().filter(|(file, _)| !file.starts_with("integration-tests/borders")) {
        for piece in text::pieces(&source).into_iter().filter(|piece| piece.kind == Kind::Literal) {
            let text = piece.text.replace('\\', " ").split_whitespace().collect::<Vec<_>>().join(" ");
            let ours = PHRASES.iter().filter(|(phrase, _)| text.contains(phrase));
            found.extend(ours.map(|(phrase, say)| format!("{file}:{}: {phrase} (say {say})", piece.line)));
        }
    }
    hold("has a phrase that users read twice", found, &[]);
}

#[test]
fn comments_are_no_wider_than_the_code() {
    let mut found = Vec::new();
    for (file, source) in sources() {
        let commented: BTreeSet<_> = comment_lines(&source).map(|(line, _)| line).collect();
        let wide = source.lines().enumerate().filter(|(_, line)| line.chars().count() > WIDTH);
        let wide = wide.filter(|(at, _)| commented.contains(&(at + 1)));
        found.extend(wide.map(|(at, line)| format!("{file}:{} ({})", at + 1, line.chars().count())));
    }
    hold(&format!("is a comment wider than {WIDTH} columns"), found, &[]);
}

#[test]
fn doc_comments_stand_alone() {
    let mut found = Vec::new();
    for (file, source) in sources() {
        let mut before = None;
        for (at, line) in source.lines().enumerate() {
            let text = doc_text(&file, line);
            let begins = text.filter(|_| before.is_none());
            if begins.is_some_and(|text| BACKWARDS.iter().any(|begin| text.starts_with(begin))) {
                found.push(format!("{file}:{}: {}", at + 1, line.trim_start()));
            }
            before = text;
        }
    }
    hold("is a comment that does not begin with what it is about", found, &[]);
}

#[test]
fn no_two_types_of_a_crate_have_one_name() {
    let mut found = Vec::new();
    for (package, sources) in crates() {
        let mut defined: BTreeMap<String, Vec<&Path>> = BTreeMap::new();
        for module in sources.modules.values() {
            for name in module.items.iter().filter_map(type_name) {
                defined.entry(name).or_default().push(&module.file);
            }
        }
        let repeated = defined.into_iter().filter(|(_, files)| files.len() > 1);
        let shown = |files: Vec<&Path>| {
            files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", ")
        };
        found.extend(repeated.map(|(name, files)| format!("{package}: {name} in {}", shown(files))));
    }
    hold("is the name of two types", found, &[]);
}

#[test]
fn vague_names_of_functions_are_few_in_a_crate() {
    let mut named: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for (package, sources) in crates() {
        for module in sources.modules.values() {
            for name in module.items.iter().flat_map(own_functions).filter(|name| VAGUE.contains(&&**name)) {
                let files = named.entry((package.clone(), name)).or_default();
                files.push(module.file.display().to_string());
            }
        }
    }
    let found = named.into_iter().filter(|(_, files)| files.len() > MOST_OF_A_NAME);
    let shown = |((package, name), files): ((String, String), Vec<String>)| {
        format!("{package}: {name} ({}) in {}", files.len(), files.join(", "))
    };
    hold("is a name that many types have: say what is made or read", found.map(shown).collect(), &[]);
}

/// Functions that a type has of its own.
fn own_functions(item: &Item) -> Vec<String> {
    let Item::Impl(block) = item else { return Vec::new() };
    let functions = block.items.iter().filter(|_| block.trait_.is_none());
    let name = |item: &ImplItem| match item {
        ImplItem::Fn(function) => Some(function.sig.ident.to_string()),
        _ => None,
    };
    functions.filter_map(name).collect()
}

/// The production code of every library and program, by its package's name.
fn crates() -> Vec<(String, Sources)> {
    let root = workspace::root();
    let packages = workspace::packages().into_values();
    let roots =
        packages.flat_map(|package| package.roots.into_iter().map(move |root| (package.name.clone(), root)));
    let text = |file: &Path| std::fs::read_to_string(root.join(file)).ok();
    roots.map(|(name, root)| (name, Sources::read(&root, &text))).collect()
}

#[test]
fn types_are_nouns() {
    const DEFINING: [&str; 4] = ["enum", "struct", "trait", "type"];
    let mut found = Vec::new();
    for (file, source) in sources().filter(|(file, _)| file.ends_with(".rs")) {
        for piece in text::pieces(&source).into_iter().filter(|piece| piece.kind == Kind::Code) {
            let names = identifiers(piece.text);
            let types = names.windows(2).filter(|pair| DEFINING.contains(&pair[0])).map(|pair| pair[1]);
            found.extend(types.filter(|name| !is_noun(name)).map(|name| format!("{file}: {name}")));
        }
    }
    let shown = found.join("\n  ");
    assert!(found.is_empty(), "a participle does not say what a thing is:\n  {shown}");
}

fn is_noun(name: &str) -> bool {
    match &text::words(name)[..] {
        _ if !name.starts_with(char::is_uppercase) => true,
        [word] if NO_NOUNS.contains(&word.as_str()) => false,
        [word] => !word.ends_with("ed") || NOUNS.contains(&word.as_str()),
        _ => true,
    }
}

fn type_name(item: &Item) -> Option<String> {
    match item {
        Item::Struct(item) => Some(item.ident.to_string()),
        Item::Enum(item) => Some(item.ident.to_string()),
        Item::Trait(item) => Some(item.ident.to_string()),
        _ => None,
    }
}

/// Every file of Rust and protobuf, by its path.
fn sources() -> impl Iterator<Item = (String, String)> {
    let root = workspace::root();
    workspace::files(&root, &[".rs", ".proto"]).into_iter().map(move |file| {
        let source = std::fs::read_to_string(root.join(&file)).expect("it was found a moment ago");
        (file.display().to_string(), source)
    })
}

/// The text of a line of a doc comment; in protobuf every comment is one.
fn doc_text<'l>(file: &str, line: &'l str) -> Option<&'l str> {
    let marks = if file.ends_with(".proto") { &["//"][..] } else { &["///", "//!"] };
    marks.iter().find_map(|mark| line.trim_start().strip_prefix(mark)).map(str::trim_start)
}

/// Lines of comments with their numbers.
fn comment_lines(source: &str) -> impl Iterator<Item = (usize, &str)> {
    let comments = text::pieces(source).into_iter().filter(|piece| piece.kind == Kind::Comment);
    comments.flat_map(|Piece { line, text, .. }| {
        text.lines().enumerate().map(move |(at, text)| (line + at, text))
    })
}

fn identifiers(code: &str) -> Vec<&str> {
    let words = code.split(|c: char| !(c.is_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with(|c: char| c.is_alphabetic() || c == '_')).collect()
}

/// The field's word for what of this name is ours.
fn field_word(name: &str) -> Option<&'static str> {
    let words = text::words(name);
    let ours = OURS.iter().find(|(ours, _)| words.iter().any(|word| word == ours));
    let whole = NAMES.iter().find(|(ours, _)| *ours == name);
    ours.or(whole).map(|(_, field)| *field)
}

/// No place breaks the rule apart from the exceptions, and each exception is needed.
fn hold(rule: &str, found: Vec<String>, exceptions: &Exceptions) {
    for (place, _) in exceptions {
        let is_needed = found.iter().any(|found| found.starts_with(place));
        assert!(is_needed, "{place} no longer {rule}: take it off the list");
    }
    let is_excepted = |found: &String| exceptions.iter().any(|(place, _)| found.starts_with(place));
    let found: Vec<_> = found.into_iter().filter(|found| !is_excepted(found)).collect();
    assert!(found.is_empty(), "each of these {rule}:\n  {}", found.join("\n  "));
}
