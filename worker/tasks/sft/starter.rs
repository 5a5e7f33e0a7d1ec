//! A run file for chats, from what is in them.

use std::path::{Path, PathBuf};

use coxswain_data::{DataError, shards::Shards, yaml::yaml_scalar};
use coxswain_task::{StarterFile, StarterJob};
use serde_json::Value;

use super::data::has_turns;
use crate::{
    found::{LOOKED_AT, ending, files, first_line, shards, the_one},
    starter::Starter,
    tokens::lines::Lines,
};

/// Chats at a place that a user names.
struct FoundChats {
    /// As `data.path` is to say it.
    path: PathBuf,
    chats: u64,
    /// Where they lie, in a few words.
    about: String,
}

/// The run file; nothing if there are no chats.
pub fn starter(job: &StarterJob<'_>) -> Option<Result<StarterFile, DataError>> {
    let found = match found(job.data)? {
        Ok(found) => found,
        Err(error) => return Some(Err(error)),
    };
    let mut file = Starter::new(job, "sft");
    file.lines("model:").model(job, "Qwen2.5-VL");
    file.lines("  weights_dtype: bfloat16 # frozen weights in half the memory\n");
    file.lines("lora: {} # rank 16 on every linear of the language model\n");
    file.lines("data:").lines(format_args!("  path: {}", yaml_scalar(&found.path.display().to_string())));
    file.lines(format_args!("  # {}", found.about));
    file.lines("  max_tokens: 4096 # of a chat, images included; the rest is cut off");
    let training = file.holdout(found.chats);
    file.lines("");
    Some(Ok(StarterFile { saw: found.about, text: file.train(job, training) }))
}

/// Whether there are chats at a place, whose images are then theirs.
pub fn has_chats(place: &Path) -> bool {
    found(place).is_some()
}

fn found(place: &Path) -> Option<Result<FoundChats, DataError>> {
    let lines = |file: &PathBuf| ["jsonl", "ndjson", "json"].contains(&&*ending(file)) && is_chats(file);
    let of_lines: Vec<PathBuf> = files(place).into_iter().filter(lines).collect();
    if let Some(file) = the_one(place, &of_lines, "files of chats") {
        return Some(file.and_then(in_lines));
    }
    match shards(place)? {
        Ok((path, shards)) => in_shards(path, &shards).map(Ok),
        Err(error) => Some(Err(error)),
    }
}

fn is_chats(file: &Path) -> bool {
    let line = first_line(file).and_then(|line| serde_json::from_str::<Value>(&line).ok());
    line.is_some_and(|chat| ["messages", "conversations"].iter().any(|key| chat.get(key).is_some()))
}

fn in_lines(path: PathBuf) -> Result<FoundChats, DataError> {
    let chats = Lines::scan(&path, |_, _| Ok(()))?.len();
    let about = format!(
        "{chats} chats, one a line; paths of images are relative to the file's directory, or to data.images"
    );
    Ok(FoundChats { path, chats, about })
}

fn in_shards(path: PathBuf, shards: &Shards) -> Option<FoundChats> {
    let chats = shards.len();
    let is_json = |sample| {
        let text = shards.read_member(shards.with_ending(sample, "json")?).ok()?;
        Some(has_turns(&String::from_utf8_lossy(&text)))
    };
    let with_turns = (0..chats.min(LOOKED_AT)).filter(|sample| is_json(*sample) == Some(true)).count();
    let has_captions = (0..chats.min(LOOKED_AT)).any(|sample| shards.with_ending(sample, "txt").is_some());
    let about = match (with_turns, has_captions) {
        (0, false) => return None,
        (0, true) => format!("{chats} samples of shards: images, and a .txt with the caption"),
        _ => format!("{chats} samples of shards: a .json with the chat, and its images"),
    };
    Some(FoundChats { path, chats, about })
}
