//! Task texts by `task_index`: `meta/tasks.parquet` (v3.0) or `meta/tasks.jsonl` (v2.1, v2.0).

use std::{collections::BTreeMap, path::Path};

use serde::Deserialize;

use super::tables::Table;
use crate::{error::DataError, text::read_text};

/// Texts by `task_index`. A map, since an index may be anything: a table by it would be as long as it says.
pub type Tasks = BTreeMap<i64, String>;

fn insert(tasks: &mut Tasks, index: i64, text: String, path: &Path) -> Result<(), DataError> {
    if index < 0 {
        let remedy = "task indices start at 0";
        return Err(DataError::invalid(path, "task_index", index.to_string(), remedy));
    }
    tasks.insert(index, text);
    Ok(())
}

/// Reads the JSON lines of v2.1 and v2.0.
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
                "each line needs task_index and task",
            )
        })?;
        insert(&mut tasks, line.task_index, line.task, path)?;
    }
    Ok(tasks)
}

/// Reads v3.0's parquet: the texts are a pandas index, whose column is called `task` or `__index_level_0__`.
pub fn read_parquet(path: &Path) -> Result<Tasks, DataError> {
    let table = Table::read_footer(path)?;
    let (texts, indices) = (table.texts("task")?, table.integers("task_index")?);
    let (Some(texts), Some(indices)) = (texts, indices) else {
        let found = format!("{:?}", table.names());
        let remedy = "expected columns task_index (integers) and task (text)";
        return Err(DataError::invalid(path, "columns", found, remedy));
    };
    let mut tasks = Tasks::new();
    for (index, text) in indices.into_iter().zip(texts) {
        let index = index.ok_or_else(|| {
            DataError::invalid(path, "task_index", "missing for a task (null)", "restore the metadata")
        })?;
        if let Some(text) = text {
            insert(&mut tasks, index, text, path)?;
        }
    }
    Ok(tasks)
}
