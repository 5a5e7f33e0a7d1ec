//! Task texts by `task_index`: `meta/tasks.parquet` (v3.0) or `meta/tasks.jsonl` (v2.1).

use std::path::Path;

use serde::Deserialize;

use super::tables::Table;
use crate::{error::DataError, text::read_text};

/// Texts by `task_index`; an index without a text is `None`.
pub type Tasks = Vec<Option<String>>;

/// More tasks than this are a garbled index, not a data set.
const MAX_TASKS: usize = 10_000_000;

fn insert(tasks: &mut Tasks, index: i64, text: &str, path: &Path) -> Result<(), DataError> {
    let slot = usize::try_from(index).ok().filter(|i| *i < MAX_TASKS).ok_or_else(|| {
        DataError::invalid(path, "task_index", index.to_string(), "task indices count from 0")
    })?;
    if tasks.len() <= slot {
        tasks.resize(slot + 1, None);
    }
    tasks[slot] = Some(text.to_string());
    Ok(())
}

/// Reads v2.1's JSON lines.
pub fn read_jsonl(path: &Path) -> Result<Tasks, DataError> {
    #[derive(Deserialize)]
    struct Line {
        task_index: i64,
        task: String,
    }
    let mut tasks = Tasks::new();
    for (number, line) in read_text(path)?.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        let line: Line = serde_json::from_str(line).map_err(|e| {
            DataError::invalid(
                path,
                format!("line {}", number + 1),
                e.to_string(),
                "needs task_index and task",
            )
        })?;
        insert(&mut tasks, line.task_index, &line.task, path)?;
    }
    Ok(tasks)
}

/// Reads v3.0's parquet: the texts are a pandas index, whose column is called `task` or `__index_level_0__`.
pub fn read_parquet(path: &Path) -> Result<Tasks, DataError> {
    let table = Table::open(path)?;
    let (texts, indices) = (table.texts("task")?, table.integers("task_index")?);
    let (Some(texts), Some(indices)) = (texts, indices) else {
        let found = format!("columns {:?}", table.names());
        return Err(DataError::invalid(path, "columns", found, "expected task_index and the task text"));
    };
    let mut tasks = Tasks::new();
    for (index, text) in indices.into_iter().zip(texts) {
        let index = index.ok_or_else(|| {
            DataError::invalid(path, "task_index", "a task without one (null)", "restore the metadata")
        })?;
        if let Some(text) = text {
            insert(&mut tasks, index, &text, path)?;
        }
    }
    Ok(tasks)
}
