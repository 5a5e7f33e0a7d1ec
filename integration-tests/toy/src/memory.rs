//! What a rank of a run will hold, from the run file and the table's footer alone.

use std::{fs::File, path::Path};

use coxswain_data::DataError;
use coxswain_proto::{
    human,
    memory::Category,
    run_spec::{Recompute, RunSpec},
};
use coxswain_task::{
    TaskError,
    memory::{Ask, Place, Prediction, Subject, Suggestion},
};
use parquet::file::metadata::ParquetMetaDataReader;
use serde_json::{Value, json};

use crate::{network::layout, settings::Settings};

/// Of a value.
const FLOAT: u64 = 4;

/// Sizes of a run.
#[derive(Clone, Debug)]
pub struct Sizes {
    spec: RunSpec,
    settings: Settings,
    rows: u64,
    trainables: u64,
}

impl Sizes {
    /// Reads the table's footer.
    pub fn read(spec: &RunSpec) -> Result<Self, DataError> {
        let path = Path::new(&spec.data.path);
        let file = File::open(path).map_err(DataError::io(path, "read"))?;
        let footer = ParquetMetaDataReader::new().parse_and_finish(&file);
        let footer = footer.map_err(|error| DataError::parquet(path, error))?;
        Ok(Self::of(spec, footer.file_metadata().num_rows().max(0) as u64))
    }

    fn of(spec: &RunSpec, rows: u64) -> Self {
        let settings = Settings::of(spec);
        let trainables = layout(&settings).0.len() as u64;
        Self { spec: spec.clone(), settings, rows, trainables }
    }

    /// Values of a row: inputs and target.
    fn columns(&self) -> u64 {
        self.settings.data.inputs.len() as u64 + 1
    }

    /// What a pass over so many rows holds: in the forward pass, between the two, in the backward pass.
    fn pass(&self, rows: u64) -> Prediction {
        let inputs = FLOAT * rows * (self.columns() - 1);
        let hidden = FLOAT * rows * self.settings.network.width as u64;
        // Before the activation and after it; recompute keeps the latter, which the head's weight asks for.
        let (forward, kept) = match self.spec.train.recompute {
            Recompute::None => (inputs + 2 * hidden, inputs + 2 * hidden),
            _ => (inputs + 2 * hidden, inputs + hidden),
        };
        // One gradient beside the values before and after the activation: the next is written over it.
        Prediction::of_pass(forward, kept, inputs + 3 * hidden)
    }
}

impl Subject for Sizes {
    fn spec(&self) -> &RunSpec {
        &self.spec
    }

    fn model(&self) -> String {
        format!("a network of {} inputs and {} units", self.columns() - 1, self.settings.network.width)
    }

    fn predict(&self, ask: Ask) -> Prediction {
        let Prediction { forward, kept, backward, .. } = self.pass(ask.micro_batch);
        let mut prediction = Prediction::of_engine(&self.spec, self.trainables, ask);
        (prediction.forward, prediction.kept, prediction.backward) = (forward, kept, backward);
        prediction.set(Category::Activations, forward.max(backward));
        let batch = FLOAT * ask.micro_batch * self.columns();
        prediction.set(
            Category::Input,
            match ask.place {
                Place::Gpu => batch,
                // The table, and micro-batches that are read ahead.
                Place::Host { .. } => {
                    FLOAT * self.rows * self.columns() + (self.spec.data.prefetch as u64 + 1) * batch
                }
            },
        );
        prediction
    }

    fn beside_gpu(&self, ask: Ask) -> u64 {
        Prediction::of_engine_beside_gpu(&self.spec, self.trainables, ask)
    }

    fn suggestions(&self, ask: Ask) -> Vec<Suggestion> {
        let half = ask.micro_batch / 2;
        if half == 0 {
            return Vec::new();
        }
        let peak = |micro_batch| self.predict(Ask { micro_batch, ..ask }).peak() as i64;
        vec![Suggestion {
            what: "half the micro-batch".into(),
            setting: format!("train.micro_batch={half}"),
            saves: peak(ask.micro_batch) - peak(half),
            remark: "same global batch, accumulation doubles".into(),
        }]
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        let trained = format!("{} parameters trained in float32", human::grouped(self.trainables));
        let table = format!("{} rows of {} inputs", human::grouped(self.rows), self.columns() - 1);
        vec![("network", trained), ("table", table)]
    }

    fn to_json(&self) -> Value {
        json!({"parameters": {"trainable": self.trainables}, "table": {"rows": self.rows}})
    }

    fn changed(&self, change: &dyn Fn(&mut RunSpec)) -> Result<Box<dyn Subject>, TaskError> {
        let mut spec = self.spec.clone();
        change(&mut spec);
        Ok(Box::new(Self::of(&spec, self.rows)))
    }
}
