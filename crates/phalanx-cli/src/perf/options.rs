//! The options of `phalanx perf`: the reference benchmark's letters, as far as they have a meaning here.
//!
//! Long names have underscores, as there. Hyphens work, too.

use super::operation::Operation;
use super::plan::{self, Backend, Plan, Registration, Roots, Step};
use super::reduction::RedOp;
use super::report::Average;
use super::values::{self, Choice};
use crate::parse;
use crate::size;
use anyhow::{Result, bail, ensure};
use phalanx::DType;
use phalanx::nccl::GpuAlgorithm;
use std::path::{Path, PathBuf};
use std::time::Duration;

const SIZES: &str = "Sizes";
const WORK: &str = "What is communicated";
const MEASUREMENT: &str = "How it is measured";
const RANKS: &str = "Ranks";
const OUTPUT: &str = "Output";

const DEFAULT_MIN: usize = 4;
const DEFAULT_MAX: usize = 64 << 20;

/// Measure how fast an operation is, and check that its results are right.
///
/// Prints one line per size: the time, the bandwidth, and the number of wrong elements, first with
/// separate input and output buffers (out of place), then with one buffer for both (in place). The
/// exit status is 0 if all elements are right and 3 if any is wrong; `phalanx --help` lists the others.
///
/// algbw is the size divided by the time. busbw is the bandwidth of the busiest link: it can be compared
/// with the hardware's bandwidth, whatever the number of ranks. 1 GB is 1e9 bytes.
///
/// On the host, a time is the median of iterations that all ranks begin together: at one moment of the
/// host's clock if each rank has a core, else after a barrier. p50, p95 and p99 (with -I) are of these
/// iterations.
///
/// On GPUs, a time is that of the reference benchmark: the average of a loop that enqueues every iteration
/// and then waits for the stream, and the mean of all ranks. p50, p95 and p99 are of the times between CUDA
/// events in a second loop, of the slowest rank.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct PerfArgs {
    /// The operation to measure.
    #[arg(value_enum)]
    pub operation: Operation,

    /// The smallest size of a rank's larger buffer: a multiple of the element type's size. K, M and G, or KiB,
    /// MiB and GiB, are powers of 1024; KB, MB and GB are powers of 1000 [default: 4, or one element]
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", value_parser = size::parse, allow_hyphen_values = true, help_heading = SIZES)]
    min: Option<usize>,
    /// The largest size [default: 64M]
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", value_parser = size::parse, allow_hyphen_values = true, help_heading = SIZES)]
    max: Option<usize>,
    /// Add this to a size to get the next one, instead of multiplying.
    #[arg(short = 'i', long = "stepbytes", value_name = "SIZE", value_parser = size::parse, conflicts_with = "factor", allow_hyphen_values = true, help_heading = SIZES)]
    step: Option<usize>,
    /// Multiply a size by this to get the next one.
    #[arg(short = 'f', long = "stepfactor", value_name = "N", value_parser = parse::count, default_value = "4", allow_negative_numbers = true, help_heading = SIZES)]
    factor: usize,

    /// The reduction: sum, prod, min, max, avg, mulsum or all. mulsum is a sum in which each rank's
    /// contribution is first multiplied by the rank's own factor.
    #[arg(short = 'o', long = "op", value_name = "OP", value_parser = values::reduction, default_value = "sum", help_heading = WORK)]
    op: Choice<RedOp>,
    /// The element type: f32, f64, f16, bf16, f8e4m3, f8e5m2, i8 … i64, u8 … u64, or all.
    #[arg(short = 'd', long = "datatype", value_name = "TYPE", value_parser = values::dtype, default_value = "f32", help_heading = WORK)]
    dtype: Choice<DType>,
    /// The root, for operations that have one: a rank, or all for each rank in turn.
    #[arg(short = 'r', long = "root", value_name = "RANK", value_parser = values::root, default_value = "0", allow_hyphen_values = true, help_heading = WORK)]
    root: Choice<usize>,
    /// The buffers' memory. 0: the rank's own. 1: on the host, memory from Comm::alloc, which peers read
    /// directly; on GPUs, memory registered with NCCL. 2: on GPUs, symmetric windows.
    #[arg(short = 'R', long = "local_register", alias = "local-register", value_name = "0|1|2", value_parser = clap::value_parser!(u8).range(0..=2), default_value = "0", allow_negative_numbers = true, help_heading = WORK)]
    registration: u8,
    /// GPUs: what carries collectives out. auto: the fastest for each call; nccl; or one of phalanx's own kernels for all that
    /// have one: ll, ll128, two_hops_ll, two_hops_ll128 [default: PHALANX_GPU_ALGORITHM, else auto]
    #[arg(long, value_name = "NAME", value_parser = values::algorithm, help_heading = WORK)]
    algorithm: Option<GpuAlgorithm>,

    /// Timed iterations of each size [default: 10 to 20000, fewer for larger sizes; on GPUs 20]
    #[arg(short = 'n', long = "iters", value_name = "N", value_parser = values::count, allow_negative_numbers = true, help_heading = MEASUREMENT)]
    iterations: Option<usize>,
    /// Untimed iterations before them [default: a fifth of the timed ones; on GPUs 5]
    #[arg(short = 'w', long = "warmup_iters", alias = "warmup-iters", value_name = "N", value_parser = parse::count, allow_negative_numbers = true, help_heading = MEASUREMENT)]
    warmup: Option<usize>,
    /// Operations in one iteration, one after the other; the time is divided by their number.
    #[arg(short = 'm', long = "agg_iters", alias = "agg-iters", value_name = "N", value_parser = values::count, default_value = "1", allow_negative_numbers = true, help_heading = MEASUREMENT)]
    aggregate: usize,
    /// Repeat the whole run this many times; 0 repeats it until it is interrupted.
    #[arg(short = 'N', long = "run_cycles", alias = "run-cycles", value_name = "N", value_parser = parse::count, default_value = "1", allow_negative_numbers = true, help_heading = MEASUREMENT)]
    cycles: usize,
    /// Check the results of each size this many times; 0 leaves the check out.
    #[arg(short = 'c', long = "check", value_name = "N", value_parser = parse::count, default_value = "1", allow_negative_numbers = true, help_heading = MEASUREMENT)]
    checks: usize,
    /// Report the average of a loop without barriers as the time, as the reference benchmark does, instead
    /// of the median of iterations that the ranks begin together. 0: rank 0's average; 1: the mean of all
    /// ranks; 2: the least; 3: the greatest. On GPUs the time is always such an average [default there: 1]
    #[arg(short = 'a', long = "average", value_name = "0|1|2|3", value_parser = values::average, allow_negative_numbers = true, help_heading = MEASUREMENT)]
    loop_average: Option<Average>,
    /// GPUs: put all iterations into a CUDA graph and launch it this many times; 0 enqueues each operation.
    #[arg(short = 'G', long = "cudagraph", value_name = "N", value_parser = parse::count, default_value = "0", allow_negative_numbers = true, help_heading = MEASUREMENT)]
    graph_launches: usize,
    /// GPUs, 1: wait for each iteration before the next is enqueued.
    #[arg(short = 'z', long = "blocking", value_name = "0|1", value_parser = values::switch(), default_value = "0", default_missing_value = "1", num_args = 0..=1, allow_negative_numbers = true, help_heading = MEASUREMENT)]
    blocking: u8,
    /// GPUs, 1: also print the time of the call that enqueues an operation (with -G, its share of a launch).
    #[arg(short = 'C', long = "report_cputime", alias = "report-cputime", value_name = "0|1", value_parser = values::switch(), default_value = "0", default_missing_value = "1", num_args = 0..=1, allow_negative_numbers = true, help_heading = MEASUREMENT)]
    cpu_time: u8,
    /// 1: also print p50, p95, p99 and the spread of the iterations' times, and save every one with --json.
    #[arg(short = 'I', long = "per_iter_timing", alias = "per-iter-timing", value_name = "0|1", value_parser = values::switch(), default_value = "0", default_missing_value = "1", num_args = 0..=1, allow_negative_numbers = true, help_heading = MEASUREMENT)]
    per_iteration: u8,
    /// Fail when a rank waits longer than this many seconds for the others.
    #[arg(short = 'T', long = "timeout", value_name = "SECONDS", value_parser = parse::seconds, allow_negative_numbers = true, help_heading = MEASUREMENT)]
    timeout: Option<Duration>,

    /// The backend that moves the data.
    #[arg(long, value_enum, value_name = "NAME", default_value_t = Backend::Auto, help_heading = RANKS)]
    pub backend: Backend,
    /// Ranks that are threads of one process [default: one per GPU; on the host one per usable core, at
    /// least 2]
    #[arg(short = 't', long = "threads", value_name = "N", value_parser = parse::ranks, conflicts_with = "processes", allow_negative_numbers = true, help_heading = RANKS)]
    threads: Option<usize>,
    /// Ranks that are processes, which this program starts.
    #[arg(short = 'p', long = "processes", value_name = "N", value_parser = parse::ranks, allow_negative_numbers = true, help_heading = RANKS)]
    processes: Option<usize>,
    /// Multiply the number of ranks by this. In the reference benchmark it is the GPUs of a thread; here each
    /// GPU has its own thread or, with -p, process.
    #[arg(short = 'g', long = "ngpus", value_name = "N", value_parser = parse::ranks, allow_negative_numbers = true, help_heading = RANKS)]
    gpus_per_thread: Option<usize>,
    /// Pin rank r to core r, modulo the number of cores (Linux). Figures are steadier: without it the system
    /// may run two ranks on one core.
    #[arg(long, help_heading = RANKS)]
    pin: bool,
    /// This process is one of the ranks of --processes.
    #[arg(long = "as-rank", hide = true)]
    pub as_rank: bool,

    /// Write the results to this JSON file, with all figures. - is standard output; the table then goes to
    /// standard error.
    #[arg(short = 'J', long = "json", alias = "output_file", value_name = "FILE", help_heading = OUTPUT)]
    pub json: Option<PathBuf>,
    /// Write the results to this CSV file; - as with --json.
    #[arg(long, value_name = "FILE", help_heading = OUTPUT)]
    pub csv: Option<PathBuf>,
    /// Draw time and bus bandwidth by size to this file; its name ends in .svg or .png.
    #[arg(long, value_name = "FILE", help_heading = OUTPUT)]
    pub plot: Option<PathBuf>,
    /// Print the ratio of each time to that in a run saved with --json (0.5 is twice as fast now).
    #[arg(long, value_name = "SAVED.json", help_heading = OUTPUT)]
    pub compare: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  phalanx perf all_reduce
  phalanx perf all_reduce -b 8 -e 128M -f 2 -d f16 -o max
  phalanx perf all_reduce --backend nccl -t 4 -b 8 -e 2G -f 2 -C
  phalanx perf all_reduce --backend nccl -p 4 -b 8 -e 64K -n 100 -G 10
  phalanx perf put_signal -p 2 -b 8 -e 1G -f 2
  phalanx perf all_gather -p 4 --pin -J before.json
  phalanx perf all_gather -p 4 --pin --compare before.json --plot after.svg
  phalanx launch -n 4 -- phalanx perf broadcast -r all";

impl PerfArgs {
    /// The step from one size to the next.
    pub fn step(&self) -> Step {
        self.step.map_or(Step::Times(self.factor), Step::Plus)
    }

    /// The numbers of thread ranks and of process ranks that the options ask for.
    pub fn ranks(&self) -> Result<(Option<usize>, Option<usize>)> {
        let Some(gpus) = self.gpus_per_thread else { return Ok((self.threads, self.processes)) };
        let times = |ranks: usize| parse::ranks(&(ranks * gpus).to_string()).map_err(anyhow::Error::msg);
        match self.processes {
            Some(processes) => Ok((None, Some(times(processes)?))),
            None => Ok((Some(times(self.threads.unwrap_or(1))?), None)),
        }
    }

    /// The plan that these options describe.
    pub fn plan(&self) -> Result<Plan> {
        self.check_gpu_options()?;
        self.check_files()?;
        let operation = self.operation;
        let (sizes, dtypes) = self.sizes_and_types()?;
        Ok(Plan {
            operation,
            sizes,
            dtypes,
            reductions: match self.op {
                _ if !operation.reduces() => vec![None],
                Choice::One(op) => vec![Some(op)],
                Choice::All => RedOp::ALL.map(Some).to_vec(),
            },
            roots: match self.root {
                _ if !operation.has_root() => Roots::None,
                Choice::One(root) => Roots::One(root),
                Choice::All => Roots::All,
            },
            iterations: self.iterations,
            warmup: self.warmup,
            aggregate: self.aggregate,
            cycles: (self.cycles > 0).then_some(self.cycles),
            checks: if operation.has_data() { self.checks } else { 0 },
            timeout: self.timeout,
            backend: self.backend()?,
            algorithm: self.algorithm,
            registration: match self.registration {
                0 => Registration::None,
                1 => Registration::Local,
                _ => Registration::Symmetric,
            },
            loop_average: self.loop_average,
            graph_launches: self.graph_launches,
            blocking: self.blocking == 1,
            cpu_time: self.cpu_time == 1,
            per_iteration: self.per_iteration == 1,
            pin: self.pin,
        })
    }

    /// The backend of the operation: some operations are NVSHMEM's alone.
    fn backend(&self) -> Result<Backend> {
        let name = self.operation.name();
        match (self.backend, self.operation.is_one_sided()) {
            (Backend::Auto | Backend::Nvshmem, true) => Ok(Backend::Nvshmem),
            (_, true) => bail!("{name} is NVSHMEM's: leave --backend out, or choose nvshmem"),
            (other, false) => Ok(other),
        }
    }

    fn sizes_and_types(&self) -> Result<(Vec<usize>, Vec<DType>)> {
        if !self.operation.has_data() {
            return Ok((vec![0], vec![DType::U8]));
        }
        let default = self.default_min();
        let min = self.min.unwrap_or(default.min(self.max.unwrap_or(default)));
        let max = self.max.unwrap_or(DEFAULT_MAX.max(min));
        let sizes = plan::sizes(min, max, self.step())?;
        match self.dtype {
            Choice::One(dtype) => {
                plan::check_multiples(&sizes, dtype)?;
                Ok((sizes, vec![dtype]))
            }
            // No size fits all types: each rounds down to whole elements.
            Choice::All => Ok((sizes, DType::ALL.to_vec())),
        }
    }

    /// The smallest size if none is named: the reference benchmark's, but at least one element.
    fn default_min(&self) -> usize {
        match self.dtype {
            Choice::One(dtype) => DEFAULT_MIN.max(dtype.size()),
            Choice::All => DEFAULT_MIN,
        }
    }

    /// The files that the run writes.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        [&self.json, &self.csv, &self.plot].into_iter().flatten().map(PathBuf::as_path)
    }

    fn check_gpu_options(&self) -> Result<()> {
        let operation = self.operation;
        ensure!(
            operation.has_data() || self.graph_launches == 0,
            "-G: {} waits, which a CUDA graph cannot hold",
            operation.name()
        );
        ensure!(
            operation != Operation::PutSignal || self.graph_launches == 0,
            "-G: put_signal waits for a value that is another one each time, which a CUDA graph cannot"
        );
        ensure!(
            self.blocking == 0 || (self.graph_launches == 0 && self.cpu_time == 0),
            "-z 1: each iteration is waited for, which leaves nothing to a CUDA graph (-G), and no time of enqueueing alone (-C)"
        );
        Ok(())
    }

    fn check_files(&self) -> Result<()> {
        let files: Vec<&Path> = self.files().collect();
        if let Some(twice) = (1..files.len()).find(|at| files[..*at].contains(&files[*at])) {
            bail!("{} is named twice: results of two forms need a file each", files[twice].display());
        }
        let Some(path) = &self.plot else { return Ok(()) };
        let extension = path.extension().and_then(|extension| extension.to_str());
        ensure!(
            matches!(extension, Some("svg" | "png")),
            "--plot {}: the name must end in .svg or .png",
            path.display()
        );
        ensure!(self.operation.has_data(), "--plot: {} has no sizes to draw", self.operation.name());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn parse(line: &str) -> Result<Box<PerfArgs>, clap::Error> {
        match Cli::try_parse_from(line.split_whitespace())?.command {
            Command::Perf(args) => Ok(args),
            _ => unreachable!("the line starts with `phalanx perf`"),
        }
    }

    fn plan(options: &str) -> Plan {
        parse(&format!("phalanx perf {options}")).unwrap().plan().unwrap()
    }

    #[test]
    fn the_letters_are_those_of_the_reference_benchmark() {
        let plan =
            plan("all_reduce -b 8 -e 128M -f 2 -n 20 -w 5 -m 3 -N 0 -c 2 -o max -d half -T 9 -R 1 -I 1");
        assert_eq!((plan.sizes[0], plan.largest()), (8, 128 << 20));
        assert_eq!((plan.iterations, plan.warmup, plan.aggregate), (Some(20), Some(5), 3));
        assert_eq!((plan.cycles, plan.checks), (None, 2));
        assert_eq!(plan.reductions, [Some(RedOp::Max)]);
        assert_eq!(plan.dtypes, [DType::F16]);
        assert_eq!(plan.timeout, Some(Duration::from_secs(9)));
        assert!(plan.registration == Registration::Local && plan.per_iteration);
        assert_eq!((plan.backend, plan.graph_launches, plan.cpu_time), (Backend::Auto, 0, false));
        assert!(!plan.blocking && self::plan("all_reduce -z 1").blocking);
    }

    #[test]
    fn an_algorithm_of_gpus_has_its_name() {
        assert_eq!(plan("all_reduce").algorithm, None);
        assert_eq!(plan("all_reduce --algorithm two_hops_ll").algorithm, Some(GpuAlgorithm::TwoHopsLl));
        let refused = parse("phalanx perf all_reduce --algorithm ring").unwrap_err().to_string();
        assert!(refused.contains("ring") && refused.contains("ll128"), "{refused}");
    }

    #[test]
    fn gpus_of_a_thread_are_ranks() {
        let ranks = |options: &str| parse(&format!("phalanx perf all_reduce {options}")).unwrap().ranks();
        for (options, expected) in [
            ("", (None, None)),
            ("-t 3", (Some(3), None)),
            ("-g 4", (Some(4), None)),
            ("-t 2 -g 4", (Some(8), None)),
            ("-p 2 -g 2", (None, Some(4))),
        ] {
            assert_eq!(ranks(options).unwrap(), expected, "{options}");
        }
        assert!(ranks("-t 500 -g 500").unwrap_err().to_string().contains("250000 ranks are too many"));
    }

    #[test]
    fn what_only_gpus_have_is_refused_on_the_host() {
        for options in ["-G 3", "-R 2", "-C 1", "-C", "-z 1"] {
            let plan = plan(&format!("all_reduce {options}"));
            let error = plan.check_place(false).unwrap_err().to_string();
            assert!(error.starts_with(&options[..2]), "{error}");
        }
        assert!(plan("all_reduce -G 3 -C").check_place(true).is_ok());
        assert!(plan("all_reduce -R 1").check_place(false).is_ok());
        assert!(plan("all_reduce -R 2").check_place(true).is_ok());
        assert!(parse("phalanx perf barrier -G 1").unwrap().plan().is_err());
        for other in ["-G 1", "-C"] {
            assert!(parse(&format!("phalanx perf all_reduce {other} -z 1")).unwrap().plan().is_err());
        }
        assert!(parse("phalanx perf all_reduce --backend rccl").is_err());
        assert_eq!(plan("all_reduce --backend nccl").backend_kind(), Some(phalanx::BackendKind::Nccl));
    }

    #[test]
    fn one_sided_operations_are_nvshmem_s() {
        for operation in ["put", "get", "put_signal"] {
            assert_eq!(plan(operation).backend, Backend::Nvshmem);
            assert_eq!(plan(&format!("{operation} --backend nvshmem")).backend, Backend::Nvshmem);
            for other in ["host", "nccl"] {
                let args = parse(&format!("phalanx perf {operation} --backend {other}")).unwrap();
                assert!(args.plan().unwrap_err().to_string().contains("NVSHMEM"));
            }
        }
        let refused = |line| parse(line).unwrap().plan().unwrap_err().to_string();
        let all_reduce = plan("all_reduce --backend nvshmem");
        assert_eq!(all_reduce.backend_kind(), Some(phalanx::BackendKind::Nvshmem));
        assert_eq!(plan("put").backend_kind(), Some(phalanx::BackendKind::Host));
        assert!(refused("phalanx perf put_signal -G 2").contains("-G"));
        assert!(parse("phalanx perf put -G 2").unwrap().plan().is_ok());
    }

    #[test]
    fn the_default_is_a_table_from_4_bytes_to_64_mib() {
        let plan = plan("all_reduce");
        assert_eq!((plan.sizes[0], plan.largest(), plan.sizes.len()), (4, 64 << 20, 13));
        assert_eq!(plan.reductions, [Some(RedOp::Sum)]);
    }

    #[test]
    fn sizes_are_whole_elements() {
        let refused =
            |line: &str| parse(&format!("phalanx perf {line}")).unwrap().plan().unwrap_err().to_string();
        assert!(
            refused("all_reduce -b 10")
                .contains("10 bytes are no multiple of 4, the size of an f32: give 8 or 12")
        );
        assert!(refused("all_reduce -b 8 -e 64 -i 6").contains("14 bytes"));
        assert_eq!(plan("all_reduce -d f64").sizes[0], 8);
        assert_eq!(plan("all_reduce -d u8 -b 7 -e 7").sizes, [7]);
        assert_eq!(plan("all_reduce -d all -b 10 -e 10").sizes, [10], "each type rounds down");
        assert_eq!(plan("all_reduce -b 2 -e 8 -f 2").sizes, [2, 4, 8], "too small for an element: left out");
    }

    #[test]
    fn one_end_of_the_range_may_be_given_alone() {
        assert_eq!(plan("all_reduce -b 128M").sizes, [128 << 20]);
        assert_eq!(plan("all_reduce -e 2").sizes, [2]);
    }

    #[test]
    fn all_means_each_in_turn() {
        assert_eq!(plan("reduce -o all -d all -r -1").reductions.len(), 6);
        assert_eq!(plan("reduce -o all -d all -r -1").dtypes.len(), 14);
        assert_eq!(plan("reduce -r all").roots, Roots::All);
    }

    #[test]
    fn what_an_operation_does_not_have_is_left_out() {
        let gathered = plan("all_gather -o max -r 1");
        assert_eq!((gathered.reductions, gathered.roots), (vec![None], Roots::None));
        let barrier = plan("barrier -d all");
        assert_eq!((barrier.sizes, barrier.checks, barrier.dtypes.len()), (vec![0], 0, 1));
    }

    #[test]
    fn contradictions_are_refused() {
        assert!(parse("phalanx perf all_reduce -t 2 -p 2").is_err());
        assert!(parse("phalanx perf all_reduce -i 4 -f 2").is_err());
        assert!(parse("phalanx perf all_reduce -n 0").is_err());
        assert!(parse("phalanx perf all_reduce -t 0").is_err());
        assert!(parse("phalanx perf all_reduce --plot x.pdf").unwrap().plan().is_err());
    }

    #[test]
    fn numbers_that_are_too_large_are_refused() {
        for option in ["-n", "-w", "-m", "-G", "-p", "-t", "-g"] {
            for number in ["100000000000", "18446744073709551615"] {
                assert!(parse(&format!("phalanx perf all_reduce {option} {number}")).is_err(), "{option}");
            }
        }
    }

    #[test]
    fn numbers_of_ranks_are_checked_against_the_operation() {
        assert!(plan("ping_pong").check(1).is_err());
        assert!(plan("hypercube").check(3).is_err());
        assert!(plan("reduce -r 2").check(2).is_err());
        assert!(plan("all_gather -e 4").check(2).is_err());
        assert!(plan("all_gather -e 4 -d all").check(4).is_ok());
        assert!(plan("reduce -r 1").check(2).is_ok());
    }
}
