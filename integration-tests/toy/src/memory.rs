//! What a rank of a run will hold and compute, from the run file and the table's footer alone: the network's
//! own pass, run where tensors are sizes.

use std::{fs::File, path::Path};

use coxswain_data::DataError;
use coxswain_nn::{
    kernels::sizes,
    params::{TrainableLayout, Trainables},
};
use coxswain_proto::{human, ids::Step, memory::Category, run_spec::RunSpec};
use coxswain_task::{
    Objective, TaskError,
    dry_run::PassCost,
    memory::{Ask, Place, Prediction, Subject, Suggestion},
};
use parquet::file::metadata::ParquetMetaDataReader;
use serde_json::{Value, json};

use crate::{
    batch::Rows,
    network::{Regression, layout},
    settings::Settings,
};

/// Bytes of a value.
const FLOAT: u64 = 4;

/// Sizes of a run.
#[derive(Clone, Debug)]
pub struct Sizes {
    spec: RunSpec,
    settings: Settings,
    rows: u64,
    trained: TrainableLayout,
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
        let trained = layout(&settings).0;
        Self { spec: spec.clone(), settings, rows, trained }
    }

    /// Values of a row: inputs and target.
    fn columns(&self) -> u64 {
        self.settings.data.inputs.len() as u64 + 1
    }

    /// A pass over so many rows.
    fn pass(&self, rows: u64) -> PassCost {
        let account = sizes::Account::open();
        let (network, layout) = Regression::<sizes::Sizes>::new(&self.spec, account.device());
        let values = vec![0.0; layout.len()];
        let trainables = Trainables::new(layout, values, account.device());
        let zeros = |each: u64| vec![0.0; (rows * each) as usize];
        let batch = Rows {
            step: Step(1),
            indices: (0..rows).collect(),
            inputs: zeros(self.columns() - 1),
            targets: zeros(1),
        };
        let pass = PassCost::of(&account, |grads, clock| {
            network.forward_backward(&trainables, &batch, grads, clock).map(drop)
        });
        pass.expect("errors of zero are finite")
    }
}

impl Subject for Sizes {
    fn spec(&self) -> &RunSpec {
        &self.spec
    }

    fn layout(&self) -> &TrainableLayout {
        &self.trained
    }

    fn model(&self) -> String {
        format!("a network of {} inputs and {} units", self.columns() - 1, self.settings.network.width)
    }

    fn predict(&self, ask: Ask) -> Prediction {
        let engine = Prediction::of_engine(&self.spec, &self.trained, ask);
        let mut prediction = engine.with_pass(&self.pass(ask.micro_batch), |_| 0);
        prediction.set(Category::Activations, prediction.forward.max(prediction.backward));
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
        Prediction::of_engine_beside_gpu(&self.spec, &self.trained, ask)
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
        let trained = format!("{} parameters trained in float32", human::grouped(self.trained.len() as u64));
        let table = format!("{} rows of {} inputs", human::grouped(self.rows), self.columns() - 1);
        vec![("network", trained), ("table", table)]
    }

    fn to_json(&self) -> Value {
        json!({"parameters": {"trainable": self.trained.len()}, "table": {"rows": self.rows}})
    }

    fn changed(&self, change: &dyn Fn(&mut RunSpec)) -> Result<Box<dyn Subject>, TaskError> {
        let mut spec = self.spec.clone();
        change(&mut spec);
        Ok(Box::new(Self::of(&spec, self.rows)))
    }
}

#[cfg(test)]
mod tests {
    use coxswain_proto::config::{TaskSchema, Tasks};
    use coxswain_task::dry_run::Flops;

    use super::*;

    const TASKS: Tasks = Tasks(&[TaskSchema::of::<Settings>()]);

    #[test]
    fn a_pass_multiplies_and_adds_what_its_layers_must() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("table.yaml");
        let flops = |recompute: &str| {
            let overrides = [format!("train.recompute={recompute}")];
            let spec = RunSpec::load(&file, &overrides, TASKS).expect("the toy's run");
            Sizes::of(&spec, 100).pass(16).flops
        };
        // Three inputs, 32 units, one output. Nobody wants the gradient of the rows.
        let (hidden, head) = (2 * 16 * 3 * 32, 2 * 16 * 32);
        let kept = Flops { forward: hidden + head, backward: 2 * head + hidden };
        assert_eq!(flops("none"), kept);
        assert_eq!(flops("full"), Flops { backward: kept.backward + hidden, ..kept });
    }
}
