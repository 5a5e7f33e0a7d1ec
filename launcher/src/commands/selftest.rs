//! `cox selftest`: does this node work? One page and an exit code.

use clap::Args;
use coxswain_proto::{human, run_spec::DeviceChoice};
use coxswain_worker::{
    device::{self, Device},
    selftest::{self, Finding, Grade},
};

use crate::{
    exit::{CliError, Exit, Outcome},
    gpu::Driver,
    render::{
        say,
        table::{remarked, width},
    },
    tasks::{accelerator, tasks},
};

/// Flags of `cox selftest`.
#[derive(Args, Debug)]
pub struct SelftestArgs {
    /// Device to test: `cpu`, `cuda` (the first visible GPU), or `auto`
    #[arg(long, value_name = "auto|cpu|cuda", default_value_t = DeviceChoice::Auto)]
    device: DeviceChoice,
    /// Stop after the first probes of a GPU: one kernel, one matmul, a thousand matmuls in order
    #[arg(long)]
    first: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Tests this node.
pub fn execute(args: &SelftestArgs) -> Outcome {
    let device = device::choose(args.device, 0, accelerator())
        .map_err(|missing| CliError::usage(format!("--device {}: {missing}", args.device)))?;
    let mut findings = if device == Device::Cpu { Vec::new() } else { gpus() };
    match args.first {
        true => findings.extend(selftest::first(device, accelerator())),
        false => {
            findings.push(video());
            findings.extend(selftest::run(device, tasks()));
        }
    }
    let failed = findings.iter().filter(|finding| finding.failed()).count();
    match args.json {
        true => {
            say(serde_json::json!({"device": device.to_string(), "failed": failed, "findings": findings}))
        }
        false => say(page(device, &findings, failed)),
    };
    match failed {
        0 => Ok(()),
        _ => Err(CliError::silent(Exit::Internal)),
    }
}

/// The GPUs in the driver's words.
fn gpus() -> Vec<Finding> {
    let found = Driver::load().and_then(|driver| Ok((driver.version(), driver.gpus()?)));
    let (version, gpus) = match found {
        Ok(found) => found,
        Err(missing) => return vec![Finding::told("machine", "driver", missing)],
    };
    let driver = version.map(|version| Finding::told("machine", "driver", version));
    let gpu = |gpu: &crate::gpu::Gpu| {
        let memory = format!("{} free of {}", human::bytes(gpu.free), human::bytes(gpu.total));
        Finding::told("machine", format_args!("GPU {}", gpu.index), format!("{}, {memory}", gpu.name))
    };
    driver.into_iter().chain(gpus.iter().map(gpu)).collect()
}

/// How video is decoded.
fn video() -> Finding {
    let how = if coxswain_data::VIDEO_ASSEMBLY {
        "AV1 with assembly, H.264"
    } else {
        "AV1 without assembly (the same pixels, several times slower: built without the feature video-asm, which needs nasm), H.264"
    };
    Finding::told("machine", "video", how)
}

fn page(device: Device, findings: &[Finding], failed: usize) -> String {
    let verdict = |finding: &Finding| match finding.verdict {
        Grade::Passed => "ok",
        Grade::Failed => "FAILED",
        Grade::Told => "",
    };
    let row =
        |finding: &Finding| [finding.section.to_owned(), finding.what.clone(), verdict(finding).to_owned()];
    let rows: Vec<[String; 3]> = findings.iter().map(row).collect();
    let found: Vec<_> = findings.iter().map(|finding| finding.found.clone()).collect();
    let checked = findings.iter().filter(|finding| finding.verdict != Grade::Told).count();
    let conclusion = match failed {
        0 => format!("{device}: all {checked} checks passed"),
        failed => format!("{device}: {failed} of {checked} checks failed"),
    };
    format!("{}\n\n{conclusion}", remarked(["", "what", ""], &rows, &found, width()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_every_finding_and_ends_with_the_verdict() {
        let findings = [
            Finding::told("machine", "cores", 2),
            Finding::checked("training", "CPU", Ok("loss 1".into())),
            Finding::checked("training", "GPU", Err("losses are off".into())),
        ];
        let page = page(Device::Cuda(0), &findings, 1);
        for part in ["cores", "ok", "loss 1", "FAILED", "losses are off"] {
            assert!(page.contains(part), "{part}: {page}");
        }
        assert!(page.ends_with("cuda:0: 1 of 2 checks failed"), "{page}");
    }

    #[test]
    fn a_gpu_that_is_not_here_is_refused_before_anything_is_tested() {
        if accelerator().probe().is_err() {
            let args = SelftestArgs { device: DeviceChoice::Cuda, first: true, json: false };
            let failed = execute(&args).unwrap_err();
            assert_eq!(failed.exit, Exit::Usage);
            assert!(failed.message.unwrap().starts_with("--device cuda: "));
        }
    }
}
