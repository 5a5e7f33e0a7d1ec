//! A run file for pairs of texts, from the columns that are there.

use std::path::{Path, PathBuf};

use coxswain_data::{DataError, yaml::yaml_scalar};
use coxswain_task::{StarterFile, StarterJob};

use super::data::{Table, columns};
use crate::{
    found::{ending, files, first_line, the_one},
    starter::Starter,
    tokens::lines::Lines,
};

/// Names that say which text is read and which is written.
const USUAL: [[&str; 2]; 11] = [
    ["source", "target"],
    ["text", "summary"],
    ["document", "summary"],
    ["article", "highlights"],
    ["dialogue", "summary"],
    ["input", "output"],
    ["input_text", "target_text"],
    ["inputs", "targets"],
    ["question", "answer"],
    ["prompt", "completion"],
    ["prompt", "response"],
];

/// The run file; nothing if there is no table of texts.
pub fn starter(job: &StarterJob<'_>) -> Option<Result<StarterFile, DataError>> {
    let tables: Vec<PathBuf> = files(job.data).into_iter().filter(|file| table(file).is_some()).collect();
    let path = match the_one(job.data, &tables, "files of texts") {
        Some(Ok(path)) => path,
        Some(Err(error)) => return Some(Err(error)),
        None => return why_none(job.data).map(Err),
    };
    let columns = table(&path)?;
    Some(write(job, &path, &columns))
}

/// Endings of names of tables.
const TABLES: [&str; 5] = ["jsonl", "ndjson", "json", "csv", "tsv"];

/// Why a file that is called a table is none; nothing of a folder, and of chats.
fn why_none(file: &Path) -> Option<DataError> {
    let is_called_table = file.is_file() && TABLES.contains(&&*ending(file));
    let first = first_line(file).filter(|_| is_called_table)?;
    let is_chats = ["\"messages\"", "\"conversations\""].iter().any(|key| first.contains(key));
    if is_chats { None } else { Table::read_file(file, USUAL[0]).err() }
}

/// The columns of a file that has at least two, on a line of their own.
fn table(file: &Path) -> Option<Vec<String>> {
    let columns = if TABLES.contains(&&*ending(file)) { columns(file)? } else { return None };
    if columns.iter().any(|name| name.contains(char::is_control)) {
        return None;
    }
    let is_chats = ["messages", "conversations"].iter().any(|key| columns.iter().any(|name| name == key));
    (columns.len() >= 2 && !is_chats).then_some(columns)
}

fn write(job: &StarterJob<'_>, path: &Path, columns: &[String]) -> Result<StarterFile, DataError> {
    let has = |name: &str| columns.iter().any(|column| column == name);
    let usual = USUAL.iter().find(|pair| pair.iter().all(|name| has(name)));
    let [source, target] = usual.map_or([&*columns[0], &*columns[1]], |pair| pair.map(|name| name));
    let lines = Lines::scan(path, |_, _| Ok(()))?.len();
    // A quoted field may go on over lines, so of a table they are an upper bound.
    let pairs = lines - u64::from(ending(path) == "csv" || ending(path) == "tsv").min(lines);
    let mut file = Starter::new(job, "seq2seq");
    file.lines("model:").model(job, "T5 or mT5");
    file.lines("  weights_dtype: bfloat16 # frozen weights in half the memory\n");
    file.lines(
        "lora:\n  targets: all-linear # every linear but the head; the default is [q, v], PEFT's choice for T5\n",
    );
    file.lines("data:").lines(format_args!("  path: {}", yaml_scalar(&path.display().to_string())));
    let all = columns.join(", ");
    file.lines(format_args!("  # its columns: {all}"));
    let sure = if usual.is_some() { "" } else { " # a guess" };
    file.lines(format_args!("  source: {} # the text that is read", yaml_scalar(source)));
    file.lines(format_args!("  target: {} # the text to learn{sure}", yaml_scalar(target)));
    file.lines("  source_prefix: \"\" # prepended to every source, like T5's \"summarize: \"");
    file.lines("  max_source_tokens: 512\n  max_target_tokens: 128");
    let training = file.holdout(pairs);
    file.lines("");
    let saw = format!("a table of texts with the columns {all}");
    Ok(StarterFile { saw, text: file.train(job, training) })
}
