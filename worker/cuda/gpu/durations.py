"""Times of kernels on the GPU, by NVIDIA's profiler `ncu`."""
import collections
import csv

# Past the kernels of two steps, which load kernels and choose products, one step and the beginning of another. Clocks stay as they are.
NCU = ["ncu", "--launch-skip", "8000", "--launch-count", "3700", "--metrics", "gpu__time_duration.sum", "--print-units", "base",
       "--clock-control", "none", "--cache-control", "none", "--csv", "--page", "raw"]
MOST_KERNELS = 60


def of_kernels(log):
    """Rows of `ncu --csv`, added up by kernel, the longest first."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    table = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches, nanoseconds = collections.Counter(), collections.Counter()
    for row in csv.DictReader(lines[table:]):
        time = (row.get("gpu__time_duration.sum") or "").replace(",", "")
        if time.replace(".", "").isdigit():
            launches[row["Kernel Name"]] += 1
            nanoseconds[row["Kernel Name"]] += float(time)
    return [dict(kernel=name[:120], launches=launches[name], us=total / 1e3) for name, total in nanoseconds.most_common(MOST_KERNELS)]
