//! GPUs as text and as JSON.

use coxswain_proto::human;
use serde_json::{Value, json};

use super::table::table;
use crate::gpu::{Gpu, Peaks};

/// Every GPU with what computes on it.
pub fn once(gpus: &[Gpu], driver: Option<&str>) -> String {
    let rows: Vec<_> = gpus
        .iter()
        .map(|gpu| {
            let [index, name, total, used, free] = common(gpu);
            let capability = gpu.compute_capability.clone().unwrap_or_else(|| "?".into());
            let processors = gpu.multiprocessors.map_or_else(|| "?".into(), |count| count.to_string());
            [index, name, total, used, free, capability, processors]
        })
        .collect();
    let head = ["gpu", "name", "total", "used", "free", "capability", "multiprocessors"];
    let mut text = table(head, &rows);
    let processes: Vec<_> = gpus
        .iter()
        .flat_map(|gpu| gpu.processes.iter().map(move |process| (gpu, process)))
        .map(|(gpu, process)| {
            let used = process.used.map_or_else(|| "?".into(), human::bytes);
            let command = process.command.clone().unwrap_or_else(|| "?".into());
            [gpu.index.to_string(), process.pid.to_string(), command, used]
        })
        .collect();
    if !processes.is_empty() {
        text.push_str(&format!("\n\n{}", table(["gpu", "pid", "process", "used"], &processes)));
    }
    if let Some(driver) = driver {
        text.push_str(&format!("\n\ndriver {driver}"));
    }
    text
}

/// Every GPU with its peak, for a table that is shown again and again.
pub fn live(gpus: &[Gpu], peaks: &Peaks) -> String {
    let rows: Vec<_> = gpus
        .iter()
        .map(|gpu| {
            let [index, name, total, used, free] = common(gpu);
            [index, name, total, used, free, human::bytes(peaks.peak(gpu)), gpu.processes.len().to_string()]
        })
        .collect();
    table(["gpu", "name", "total", "used", "free", "peak", "processes"], &rows)
}

/// Every GPU as JSON, with its peaks if they are known.
pub fn json(gpus: &[Gpu], peaks: Option<&Peaks>) -> Value {
    let gpu = |gpu: &Gpu| {
        let mut value = json!(gpu);
        if let Some(peaks) = peaks {
            value["peak"] = json!(peaks.peak(gpu));
        }
        value
    };
    gpus.iter().map(gpu).collect()
}

fn common(gpu: &Gpu) -> [String; 5] {
    [
        gpu.index.to_string(),
        gpu.name.clone(),
        human::bytes(gpu.total),
        human::bytes(gpu.used),
        human::bytes(gpu.free),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::GpuProcess;

    #[test]
    fn a_gpu_is_a_row_and_so_is_a_process() {
        let gpu = Gpu {
            index: 0,
            name: "NVIDIA H200".into(),
            total: 140 << 30,
            used: 2 << 30,
            free: 138 << 30,
            compute_capability: Some("9.0".into()),
            multiprocessors: Some(132),
            processes: vec![GpuProcess { pid: 41, command: Some("cox".into()), used: Some(1 << 30) }],
        };
        let gpus = [gpu];
        assert_eq!(
            once(&gpus, Some("570.1")),
            [
                "gpu  name             total     used       free  capability  multiprocessors",
                "  0  NVIDIA H200  140.0 GiB  2.0 GiB  138.0 GiB         9.0              132",
                "",
                "gpu  pid  process     used",
                "  0   41  cox      1.0 GiB",
                "",
                "driver 570.1",
            ]
            .join("\n")
        );
        let mut peaks = Peaks::default();
        peaks.observe(&gpus);
        assert!(live(&gpus, &peaks).ends_with("138.0 GiB  2.0 GiB          1"), "{}", live(&gpus, &peaks));
        assert_eq!(json(&gpus, Some(&peaks))[0]["peak"], 2u64 << 30);
        assert_eq!(json(&gpus, None)[0]["processes"][0]["pid"], 41);
    }
}
