//! The usual GPUs, and how much of each a program can have.

use super::Gpu;

/// A GPU to plan for.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct GpuKind {
    /// As people call it.
    pub name: String,
    /// Bytes that the driver shows.
    pub total: u64,
    /// Bytes held by others.
    pub used: u64,
}

/// Name and MiB as the driver shows them, which is a little less than what is printed on the box.
const GPUS: [(&str, u64); 25] = [
    ("RTX3080-10", 10_240),
    ("RTX3060-12", 12_288),
    ("RTX4070-12", 12_282),
    ("V100-16", 16_384),
    ("T4-16", 15_360),
    ("RTX4080-16", 16_376),
    ("RTX3090-24", 24_576),
    ("RTX4090-24", 24_564),
    ("A10-24", 23_028),
    ("L4-24", 23_034),
    ("A5000-24", 24_564),
    ("V100-32", 32_768),
    ("RTX5090-32", 32_607),
    ("A100-40", 40_960),
    ("A6000-48", 49_140),
    ("RTX6000Ada-48", 49_140),
    ("L40S-48", 46_068),
    ("A100-80", 81_920),
    ("H100-80", 81_559),
    ("H100-94", 95_830),
    ("H20-96", 97_871),
    ("RTXPRO6000-96", 97_887),
    ("GB10-128", 122_570),
    ("H200-141", 143_771),
    ("B200-180", 183_359),
];

/// What tensor cores do at most with bfloat16 (float16 where there is none) and sums in float32, without
/// sparsity, in 10^12 operations a second, by their makers' data sheets.
const PEAKS: [(&str, f64); 19] = [
    ("V100", 125.0),
    ("T4", 65.0),
    ("RTX3090", 71.0),
    ("RTX4070", 58.3),
    ("RTX4080", 97.5),
    ("RTX4090", 165.2),
    ("RTX5090", 209.5),
    ("A10", 125.0),
    ("L4", 121.0),
    ("A100", 312.0),
    ("A6000", 154.8),
    ("RTX6000ADA", 364.2),
    ("RTXPRO6000", 503.8),
    ("L40S", 362.1),
    ("H100", 989.4),
    ("H20", 148.0),
    ("H200", 989.4),
    ("GB10", 125.0),
    ("B200", 2250.0),
];

/// The most that a GPU of this name, as the driver or people say it, computes with half precision, in
/// operations a second; none where it is not known.
pub fn bfloat16_peak(name: &str) -> Option<f64> {
    let name = name.to_ascii_uppercase().replace("RTX A", "A").replace("RTX ", "RTX").replace("PRO ", "PRO");
    let name = name.replace(" ADA", "ADA");
    let mut words = name.split(['-', ' ']);
    let peak = |word| PEAKS.iter().find(|(model, _)| *model == word).map(|(_, peak)| peak * 1e12);
    words.find_map(peak).filter(|_| !name.contains("LAPTOP"))
}

/// Words in the names of GPUs with tensor cores for float16 and none for bfloat16: Volta and Turing, before
/// compute capability 8.0.
const WITHOUT_BFLOAT16: [&str; 8] =
    [" V100 ", " T4 ", " TITAN V ", " TITAN RTX ", " QUADRO RTX ", " RTX 206", " RTX 207", " RTX 208"];

/// Whether a GPU of this name, as the driver or people say it, multiplies bfloat16.
pub fn multiplies_bfloat16(name: &str) -> bool {
    let name = format!(" {} ", name.to_ascii_uppercase().replace(['-', '_'], " "));
    !WITHOUT_BFLOAT16.iter().any(|words| name.contains(words))
}

/// Sizes that stand for their kind in an overview.
const OVERVIEW: [&str; 11] = [
    "RTX4070-12",
    "RTX4080-16",
    "RTX4090-24",
    "A100-40",
    "L40S-48",
    "RTX6000Ada-48",
    "A100-80",
    "RTXPRO6000-96",
    "GB10-128",
    "H200-141",
    "B200-180",
];

impl GpuKind {
    /// From `24GiB`, `24G`, `24564MiB`, or a GPU's name: `A100-40`, `a100-80`, or without the size where
    /// there is one only.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some(total) = size(text) {
            return Ok(Self { name: text.to_owned(), total, used: 0 });
        }
        let plain = |name: &str| name.to_ascii_uppercase().replace([' ', '_', '-'], "");
        let wanted = plain(text).trim_end_matches("GB").to_owned();
        let named: Vec<_> = GPUS.iter().filter(|(name, _)| plain(name) == wanted).collect();
        let model = |name: &str| plain(name.rsplit_once('-').map_or(name, |(model, _)| model));
        let found = match named.is_empty() {
            true => GPUS.iter().filter(|(name, _)| model(name) == wanted).collect(),
            false => named,
        };
        match found[..] {
            [(name, mib)] => Ok(Self { name: (*name).to_owned(), total: mib << 20, used: 0 }),
            [] => Err(format!(
                "{text}: unknown GPU; give its memory (24GiB), or one of {}",
                GPUS.map(|(name, _)| name).join(", ")
            )),
            _ => Err(format!(
                "{text}: matches several GPUs; name one of {}",
                found.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
            )),
        }
    }

    /// One GPU of each usual size.
    pub fn overview() -> Vec<Self> {
        OVERVIEW.iter().filter_map(|name| Self::parse(name).ok()).collect()
    }
}

impl From<&Gpu> for GpuKind {
    fn from(gpu: &Gpu) -> Self {
        Self { name: format!("{} {}", gpu.index, gpu.name), total: gpu.total, used: gpu.used }
    }
}

/// Bytes of `24GiB`, `24G`, `24GB`, `24564MiB`: in powers of two all the same, as GPUs are sold.
fn size(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "g" | "gb" | "gib" => 30,
        "m" | "mb" | "mib" => 20,
        _ => return None,
    };
    let amount: f64 = number.parse().ok()?;
    (amount > 0.0 && amount < 1e6).then(|| (amount * (1u64 << shift) as f64) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volta_and_turing_multiply_no_bfloat16() {
        let without: Vec<_> =
            GPUS.iter().map(|(name, _)| *name).filter(|name| !multiplies_bfloat16(name)).collect();
        assert_eq!(without, ["V100-16", "T4-16", "V100-32"]);
        for name in ["0 Tesla V100-SXM2-16GB", "1 NVIDIA GeForce RTX 2080 Ti", "Quadro RTX 6000"] {
            assert!(!multiplies_bfloat16(name), "{name}");
        }
        for name in ["NVIDIA RTX 2000 Ada Generation", "NVIDIA RTX A6000", "24GiB", "NVIDIA H200"] {
            assert!(multiplies_bfloat16(name), "{name}");
        }
    }

    #[test]
    fn a_peak_is_found_by_either_name_and_every_gpu_of_the_overview_has_one() {
        let peak = |name: &str| bfloat16_peak(name).map(|peak| peak / 1e12);
        let drivers = [
            ("0 NVIDIA GeForce RTX 4090", "RTX4090-24"),
            ("1 NVIDIA RTX 6000 Ada Generation", "RTX6000Ada-48"),
            ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTXPRO6000-96"),
            ("NVIDIA RTX A6000", "A6000-48"),
            ("NVIDIA A100-SXM4-80GB", "A100-80"),
            ("NVIDIA A10", "A10-24"),
            ("NVIDIA L40S", "L40S-48"),
        ];
        for (driver, name) in drivers {
            assert!(peak(driver).is_some() && peak(driver) == peak(name), "{driver}");
        }
        for unknown in ["NVIDIA RTX A1000", "NVIDIA GeForce RTX 4090 Laptop GPU", "24GiB", "Quadro RTX 6000"]
        {
            assert_eq!(peak(unknown), None, "{unknown}");
        }
        assert!(OVERVIEW.iter().all(|name| peak(name).is_some()));
    }

    #[test]
    fn a_gpu_is_known_by_size_and_by_name() {
        let total = |text: &str| GpuKind::parse(text).map(|gpu| gpu.total);
        assert_eq!(total("24GiB"), Ok(24 << 30));
        assert_eq!(total("1.5g"), Ok(3 << 29));
        assert_eq!(total("24564MiB"), total("RTX4090-24"));
        assert_eq!(total("a100-40"), Ok(40_960 << 20));
        assert_eq!(total("A100 80GB"), Ok(81_920 << 20));
        assert_eq!(total("h200"), Ok(143_771 << 20));
        assert!(total("A100").is_err_and(|error| error.contains("A100-40, A100-80")));
        assert!(total("Voodoo2").is_err_and(|error| error.contains("unknown GPU")));
        assert!(total("0GiB").is_err());
        assert_eq!(GpuKind::overview().len(), OVERVIEW.len());
    }
}
