//! Task texts by `task_index`: `meta/tasks.parquet` (v3.0) or `meta/tasks.jsonl` (v2.1).

use std::{fs::File, path::Path};

use arrow::array::{Array, AsArray};
use arrow::datatypes::{DataType, Int64Type};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde::Deserialize;

use crate::error::{DataError, read_text};

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
    let file = File::open(path).map_err(DataError::io(path, "read"))?;
    let reader = ParquetRecordBatchReaderBuilder::try_new(file)
        .and_then(|b| b.build())
        .map_err(|e| DataError::parquet(path, e))?;
    let mut tasks = Tasks::new();
    for batch in reader {
        let batch = batch.map_err(|e| DataError::parquet(path, e))?;
        let is_text =
            |c: &&arrow::array::ArrayRef| matches!(c.data_type(), DataType::Utf8 | DataType::LargeUtf8);
        let texts = batch.column_by_name("task").filter(is_text);
        let texts = texts.or_else(|| batch.columns().iter().find(is_text));
        let indices = batch.column_by_name("task_index").and_then(|c| c.as_primitive_opt::<Int64Type>());
        let (Some(texts), Some(indices)) = (texts, indices) else {
            let found =
                format!("columns {:?}", batch.schema().fields().iter().map(|f| f.name()).collect::<Vec<_>>());
            return Err(DataError::invalid(path, "columns", found, "expected task_index and the task text"));
        };
        for row in 0..batch.num_rows() {
            let text = match texts.as_string_opt::<i32>() {
                Some(texts) => texts.value(row),
                None => texts.as_string::<i64>().value(row),
            };
            insert(&mut tasks, indices.value(row), text, path)?;
        }
    }
    Ok(tasks)
}
