//! The table: numbers of a parquet file, read once and held.

use std::{
    collections::BTreeMap,
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_data::{DataError, Fingerprint, TrainingSamples};
use coxswain_nn::files::replace;
use coxswain_proto::{ids::Step, order::DamagedRow, run_spec::RunSpec};
use coxswain_task::{Batch, Sample, Samples};
use parquet::{
    errors::ParquetError,
    file::reader::{FileReader, SerializedFileReader},
    record::Field,
};
use safetensors::{Dtype, tensor::TensorView};

use crate::{
    batch::{Row, Rows},
    settings::Settings,
};

/// What of the file a run uses.
pub struct Table {
    path: PathBuf,
    /// Columns that are read: the inputs, then the target.
    columns: Vec<String>,
    /// `[rows, columns]`; NaN where the file has no number.
    values: Vec<f32>,
    holdout_every: u64,
    training: Arc<TrainingSamples>,
    fingerprint: Fingerprint,
}

impl Table {
    /// Reads the columns that the run names.
    pub fn open(spec: &RunSpec) -> Result<Self, DataError> {
        let (settings, path) = (Settings::of(spec), PathBuf::from(&spec.data.path));
        let columns = [settings.data.inputs, vec![settings.data.target]].concat();
        let content = std::fs::read(&path).map_err(DataError::io(&path, "read"))?;
        let values = numbers(&path, &columns)?;
        let rows = (values.len() / columns.len()) as u64;
        let every = settings.data.holdout_every;
        let block = if every > 0 { every } else { rows.max(1) };
        // The last row of every block is held out.
        let training = (0..rows).step_by(block as usize).map(|first| {
            let end = (first + block).min(rows);
            first..if every > 0 && end == first + block { end - 1 } else { end }
        });
        let training = Arc::new(TrainingSamples::new(training));
        let fingerprint = Fingerprint(*blake3::hash(&content).as_bytes());
        Ok(Self { path, columns, values, holdout_every: every, training, fingerprint })
    }

    fn rows(&self) -> u64 {
        (self.values.len() / self.columns.len()) as u64
    }

    fn row(&self, index: u64) -> Result<Row, DataError> {
        let (rows, width) = (self.rows(), self.columns.len());
        if index >= rows {
            return Err(DataError::OutOfRange { what: "sample", index, len: rows });
        }
        let values = &self.values[index as usize * width..][..width];
        if let Some(column) = values.iter().position(|value| !value.is_finite()) {
            return Err(DataError::Sample {
                path: self.path.clone(),
                index,
                episode: 0,
                frame: index,
                feature: self.columns[column].clone(),
                fault: "no finite number; correct the row".into(),
            });
        }
        let (inputs, target) = values.split_at(width - 1);
        Ok(Row { index, inputs: inputs.to_vec(), target: target[0] })
    }

    /// Writes a row as training sees it.
    pub fn write(&self, index: u64, out: &Path) -> Result<(), DataError> {
        let row = self.row(index)?;
        let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
        let (inputs, target) = (bytes(&row.inputs), bytes(&[row.target]));
        let view = |shape: usize, bytes| TensorView::new(Dtype::F32, vec![shape], bytes);
        let views = [("inputs", view(row.inputs.len(), &inputs)), ("target", view(1, &target))];
        let views = views.map(|(name, view)| (name, view.expect("as many bytes as values")));
        replace(out, |path| safetensors::serialize_to_file(views, None, path).map_err(std::io::Error::other))
            .map_err(DataError::io(out, "write"))
    }
}

/// The columns' numbers, row by row.
fn numbers(path: &Path, columns: &[String]) -> Result<Vec<f32>, DataError> {
    let broken = |error: ParquetError| DataError::parquet(path, error);
    let file = File::open(path).map_err(DataError::io(path, "read"))?;
    let reader = SerializedFileReader::new(file).map_err(broken)?;
    let mut values = Vec::new();
    for row in reader.get_row_iter(None).map_err(broken)? {
        let row = row.map_err(broken)?;
        let fields: BTreeMap<&str, f32> =
            row.get_column_iter().map(|(name, field)| (name.as_str(), number(field))).collect();
        for name in columns {
            let value = fields.get(name.as_str()).ok_or_else(|| {
                let there = fields.keys().copied().collect::<Vec<_>>().join(", ");
                DataError::invalid(path, name, "no such column", format!("name one of {there}"))
            })?;
            values.push(*value);
        }
    }
    Ok(values)
}

fn number(field: &Field) -> f32 {
    match field {
        Field::Float(value) => *value,
        Field::Double(value) => *value as f32,
        Field::Int(value) => *value as f32,
        Field::Long(value) => *value as f32,
        _ => f32::NAN,
    }
}

impl Samples for Table {
    fn training(&self) -> &Arc<TrainingSamples> {
        &self.training
    }

    fn holdout(&self) -> Vec<u64> {
        (0..self.rows()).filter(|row| self.training.number(*row).is_none()).collect()
    }

    fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    fn read(&self, index: u64) -> Result<Box<dyn Sample>, DataError> {
        Ok(Box::new(self.row(index)?))
    }

    fn collate(&self, step: Step, samples: &[&dyn Sample]) -> Box<dyn Batch> {
        let rows: Vec<&Row> = samples.iter().map(|sample| sample.content()).collect();
        Box::new(Rows::of(step, &rows))
    }

    fn take_apart(&self, batch: &dyn Batch) -> Vec<Box<dyn Sample>> {
        let rows: &Rows = batch.content();
        rows.apart().map(|row| Box::new(row) as Box<dyn Sample>).collect()
    }

    fn damaged_row(&self, index: u64, _fault: &DataError) -> DamagedRow {
        // A row is needed by its own sample alone.
        let begin = self.training.number(index).unwrap_or_default();
        DamagedRow { row: index, begin, end: begin + 1 }
    }

    fn describe(&self) -> Result<Vec<(&'static str, String)>, DataError> {
        let held_out = match self.holdout_every {
            0 => "none held out".to_owned(),
            every => format!("one of {every} held out"),
        };
        Ok(vec![("table", format!("{} rows of {} inputs, {held_out}", self.rows(), self.columns.len() - 1))])
    }
}
