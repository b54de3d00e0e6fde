//! How many operations, how many bytes, how long: counters of every communicator of this process, for monitoring.
//!
//! Counting is off until it is asked for, before the first communicator is made: by [`enable`], or by `phalanx launch --metrics`. It costs
//! an operation less than 20 ns; while it is off, nothing.
//!
//! ```no_run
//! fn main() -> phalanx::Result<()> {
//!     phalanx::metrics::enable();
//!     let comm = phalanx::init()?;
//!     // Install a recorder of the crate `metrics`, such as metrics-exporter-prometheus. Then, whenever it is scraped:
//!     phalanx::metrics::collect();
//!     comm.finalize()
//! }
//! ```
//!
//! All series have the labels `communicator`, `backend`, `rank` and `operation`:
//!
//! | name | type | meaning |
//! |---|---|---|
//! | `phalanx_operations_total` | counter | operations called |
//! | `phalanx_failures_total` | counter | operations that ended with an error |
//! | `phalanx_bytes_total` | counter | bytes in this rank's buffer, as the benchmarks count them |
//! | `phalanx_waiting_seconds` | gauge | time between enqueueing and start, where a backend knows the two apart |
//! | `phalanx_operation_seconds` | histogram | time from call to completion. Each bucket's bound is a power of four of a microsecond, and an operation may be one bucket too high. A [prepared](crate::Prepared) operation that runs again is counted, not timed |
//!
//! The series of the last 256 communicators that were dropped stay.

use super::clock::Ticks;
use super::recorder::{Recorder, next};
use super::signal;
use crate::contract::Operation;
use crate::os::sync::lock;
use std::collections::{HashMap, VecDeque};
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Environment variable that `phalanx launch --metrics` sets.
const METRICS: &str = "PHALANX_METRICS";
/// Upper bounds of the histogram, in seconds: 1 µs · 4ⁿ, up to 67 s. One more bucket has the rest.
const BOUNDS: usize = 14;
/// A duration of `2ⁿ` ticks and more is in bucket `n`, up to the last.
const TICK_BUCKETS: usize = 48;
/// Communicators that were dropped and whose counters are kept.
const KEPT: usize = 256;

static ENABLED: AtomicBool = AtomicBool::new(false);
static DROPPED: Mutex<VecDeque<Vec<Sample>>> = Mutex::new(VecDeque::new());
/// What has been handed over of each histogram.
static HANDED_OVER: Mutex<Option<HashMap<Key, [u64; BOUNDS + 1]>>> = Mutex::new(None);

type Key = (String, usize, String);

/// Counts the operations of communicators made from now on.
pub fn enable() {
    ENABLED.store(true, Ordering::Relaxed);
}

/// Whether the launcher wants counters.
pub(super) fn are_asked_for() -> bool {
    std::env::var_os(METRICS).is_some_and(|value| !value.is_empty())
}

/// Hands the counters to the recorder of the crate `metrics` that the program has installed. Call it for each scrape.
pub fn collect() {
    let samples = samples();
    let mut handed_over = lock(&HANDED_OVER);
    let before = handed_over.take().unwrap_or_default();
    let now = samples.iter().map(|sample| {
        let key = sample.key();
        sample.hand_over(before.get(&key).unwrap_or(&[0; BOUNDS + 1]));
        (key, sample.buckets)
    });
    *handed_over = Some(now.collect());
}

/// The counters in Prometheus' text format, for programs without a recorder of the crate `metrics`.
pub fn prometheus_text() -> String {
    render(&samples())
}

/// The counters of a communicator.
pub(crate) struct Counters {
    rows: Box<[Row]>,
}

/// The counters of one operation. Several threads may end operations, so these are added to atomically.
#[derive(Default)]
struct Row {
    calls: AtomicU64,
    failures: AtomicU64,
    bytes: AtomicU64,
    /// Of the last call.
    last_bytes: AtomicU64,
    /// From the call to completion.
    ticks: AtomicU64,
    /// Of these, before the start.
    waiting: AtomicU64,
    buckets: Buckets,
}

struct Buckets([AtomicU64; TICK_BUCKETS]);

impl Default for Buckets {
    fn default() -> Buckets {
        Buckets([const { AtomicU64::new(0) }; TICK_BUCKETS])
    }
}

impl Counters {
    /// Counters, if they are wanted.
    pub fn new() -> Option<Counters> {
        let rows = || (0..Operation::CODES).map(|_| Row::default()).collect();
        (ENABLED.load(Ordering::Relaxed) || are_asked_for()).then(|| Counters { rows: rows() })
    }

    /// Counts a call, of which the thread that has the `Comm` makes one at a time.
    #[inline]
    pub fn called(&self, operation: Operation, bytes: u64) {
        let row = &self.rows[operation as usize];
        next(&row.calls, 1);
        next(&row.bytes, bytes);
        row.last_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Counts a call of the operation with this code that is carried out again, with the last one's bytes.
    #[inline]
    pub fn called_again(&self, code: u8) {
        let row = &self.rows[usize::from(code)];
        next(&row.calls, 1);
        next(&row.bytes, row.last_bytes.load(Ordering::Relaxed));
    }

    /// Counts the end of an operation with this code, which took so many ticks, of which it waited so many.
    #[inline]
    pub fn ended(&self, code: u8, ticks: Ticks, waiting: Ticks, has_failed: bool) {
        let row = &self.rows[usize::from(code)];
        row.ticks.fetch_add(ticks, Ordering::Relaxed);
        if waiting > 0 {
            row.waiting.fetch_add(waiting, Ordering::Relaxed);
        }
        if has_failed {
            row.failures.fetch_add(1, Ordering::Relaxed);
        }
        let bucket = (Ticks::BITS - ticks.leading_zeros()) as usize;
        row.buckets.0[bucket.min(TICK_BUCKETS - 1)].fetch_add(1, Ordering::Relaxed);
    }
}

/// The counters of one operation of a communicator.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    communicator: String,
    backend: String,
    rank: usize,
    operation: String,
    calls: u64,
    failures: u64,
    bytes: u64,
    seconds: f64,
    waiting: f64,
    /// Operations that took at most 1 µs, at most 4 µs and more than 1, and so on; the last are longer than the last bound.
    buckets: [u64; BOUNDS + 1],
}

/// The upper bound of a bucket, in seconds.
fn bound(bucket: usize) -> f64 {
    1e-6 * 4f64.powi(bucket as i32)
}

impl Sample {
    fn new(recorder: &Recorder, operation: Operation, row: &Row, nanos_per_tick: f64) -> Sample {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let seconds = |ticks: &AtomicU64| get(ticks) as f64 * nanos_per_tick * 1e-9;
        let mut buckets = [0; BOUNDS + 1];
        for (place, count) in row.buckets.0.iter().enumerate() {
            let most = 2f64.powi(place as i32) * nanos_per_tick * 1e-9;
            let bucket = (0..BOUNDS).find(|bucket| most <= bound(*bucket)).unwrap_or(BOUNDS);
            buckets[bucket] += get(count);
        }
        Sample {
            communicator: recorder.full_name().to_owned(),
            backend: recorder.backend.to_string(),
            rank: recorder.rank,
            operation: operation.name().to_owned(),
            calls: get(&row.calls),
            failures: get(&row.failures),
            bytes: get(&row.bytes),
            seconds: seconds(&row.ticks),
            waiting: seconds(&row.waiting),
            buckets,
        }
    }

    fn key(&self) -> Key {
        (self.communicator.clone(), self.rank, self.operation.clone())
    }

    fn hand_over(&self, before: &[u64; BOUNDS + 1]) {
        let Sample { communicator, backend, operation, .. } = self;
        let labels = [
            ("communicator", communicator.clone()),
            ("backend", backend.clone()),
            ("rank", self.rank.to_string()),
            ("operation", operation.clone()),
        ];
        metrics::counter!("phalanx_operations_total", &labels).absolute(self.calls);
        metrics::counter!("phalanx_failures_total", &labels).absolute(self.failures);
        metrics::counter!("phalanx_bytes_total", &labels).absolute(self.bytes);
        metrics::gauge!("phalanx_waiting_seconds", &labels).set(self.waiting);
        let durations = metrics::histogram!("phalanx_operation_seconds", &labels);
        for (bucket, (now, before)) in self.buckets.iter().zip(before).enumerate() {
            // In the middle of the bucket, on a logarithmic scale.
            durations.record_many(bound(bucket) / 2.0, now.saturating_sub(*before) as usize);
        }
    }

    /// A line that [`parse`](Self::parse) reads.
    pub(crate) fn to_line(&self) -> String {
        let Sample {
            communicator,
            backend,
            rank,
            operation,
            calls,
            failures,
            bytes,
            seconds,
            waiting,
            buckets,
        } = self;
        let buckets: Vec<String> = buckets.iter().map(u64::to_string).collect();
        let buckets = buckets.join(",");
        let communicator = communicator.replace(['\t', '\n'], " ");
        format!(
            "{communicator}\t{backend}\t{rank}\t{operation}\t{calls}\t{failures}\t{bytes}\t{seconds:e}\t{waiting:e}\t{buckets}"
        )
    }

    /// Reads a line of a rank.
    pub fn parse(line: &str) -> Option<Sample> {
        let mut words = line.split('\t');
        let mut word = || words.next();
        let sample = Sample {
            communicator: word()?.to_owned(),
            backend: word()?.to_owned(),
            rank: word()?.parse().ok()?,
            operation: word()?.to_owned(),
            calls: word()?.parse().ok()?,
            failures: word()?.parse().ok()?,
            bytes: word()?.parse().ok()?,
            seconds: word()?.parse().ok()?,
            waiting: word()?.parse().ok()?,
            buckets: {
                let counts: Option<Vec<u64>> = word()?.split(',').map(|count| count.parse().ok()).collect();
                counts?.try_into().ok()?
            },
        };
        word().is_none().then_some(sample)
    }
}

/// The counters of all communicators of this process, the dropped ones first.
pub(super) fn samples() -> Vec<Sample> {
    let dropped: Vec<Sample> = lock(&DROPPED).iter().flatten().cloned().collect();
    let living = signal::recorders();
    dropped.into_iter().chain(living.iter().flat_map(|recorder| recorder.samples())).collect()
}

impl Recorder {
    fn samples(&self) -> Vec<Sample> {
        let Some(counters) = &self.counters else { return Vec::new() };
        let nanos_per_tick = self.scale().nanos_per_tick();
        let rows = counters.rows.iter().enumerate();
        let used = rows.filter(|(_, row)| row.calls.load(Ordering::Relaxed) > 0);
        let named = used.filter_map(|(code, row)| Some((Operation::from_code(code as u8)?, row)));
        named.map(|(operation, row)| Sample::new(self, operation, row, nanos_per_tick)).collect()
    }
}

/// The same as lines for the launcher.
pub(super) fn lines() -> Vec<String> {
    samples().iter().map(Sample::to_line).collect()
}

/// Keeps the counters of a communicator that is dropped.
pub(super) fn keep(recorder: &Recorder) {
    let samples = recorder.samples();
    if samples.is_empty() {
        return;
    }
    let mut dropped = lock(&DROPPED);
    dropped.push_back(samples);
    if dropped.len() > KEPT {
        dropped.pop_front();
    }
}

/// Samples of one or of many processes in Prometheus' text format.
pub fn render(samples: &[Sample]) -> String {
    type Value = fn(&Sample) -> String;
    const FAMILIES: [(&str, &str, &str, Value); 4] = [
        ("operations_total", "counter", "Operations called.", |s| s.calls.to_string()),
        ("failures_total", "counter", "Operations that ended with an error.", |s| s.failures.to_string()),
        ("bytes_total", "counter", "Bytes in the rank's buffer.", |s| s.bytes.to_string()),
        ("waiting_seconds", "gauge", "Time between enqueueing and start.", |s| format!("{:e}", s.waiting)),
    ];
    let mut text = String::new();
    for (name, kind, help, value) in FAMILIES {
        let _ = writeln!(text, "# HELP phalanx_{name} {help}\n# TYPE phalanx_{name} {kind}");
        for sample in samples {
            let _ = writeln!(text, "phalanx_{name}{{{}}} {}", sample.labels(), value(sample));
        }
    }
    text += "# HELP phalanx_operation_seconds Time from call to completion.\n# TYPE phalanx_operation_seconds histogram\n";
    samples.iter().for_each(|sample| text += &sample.histogram());
    text
}

impl Sample {
    fn labels(&self) -> String {
        let Sample { communicator, backend, rank, operation, .. } = self;
        let communicator = communicator.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n");
        format!(
            "communicator=\"{communicator}\",backend=\"{backend}\",rank=\"{rank}\",operation=\"{operation}\""
        )
    }

    fn histogram(&self) -> String {
        let (labels, mut text, mut total) = (self.labels(), String::new(), 0);
        for (bucket, count) in self.buckets.iter().enumerate() {
            total += count;
            let bound = if bucket == BOUNDS { "+Inf".to_owned() } else { format!("{:e}", bound(bucket)) };
            let _ = writeln!(text, "phalanx_operation_seconds_bucket{{{labels},le=\"{bound}\"}} {total}");
        }
        let seconds = self.seconds;
        let _ = writeln!(text, "phalanx_operation_seconds_sum{{{labels}}} {seconds:e}");
        let _ = writeln!(text, "phalanx_operation_seconds_count{{{labels}}} {total}");
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::{BackendKind, Blocks, Call};
    use crate::types::dtype::DType;
    use crate::types::error::Error;
    use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
    use std::sync::Arc;

    fn counting(name: &str) -> Arc<Recorder> {
        enable();
        Recorder::new(BackendKind::Host, name.into(), 1, 2)
    }

    fn all_reduce(count: usize) -> Call<'static> {
        Call { dtype: DType::F32, blocks: Blocks::Equal(count), ..Call::empty(Operation::AllReduce) }
    }

    fn samples_of(name: &str) -> Vec<Sample> {
        samples().into_iter().filter(|sample| sample.communicator == name).collect()
    }

    #[test]
    fn operations_are_counted_with_their_bytes_and_failures() {
        let recorder = counting("counted");
        for count in [10, 20] {
            recorder.end(recorder.begin(&all_reduce(count)), Ok(())).unwrap();
        }
        let last = recorder.last().unwrap();
        assert!(recorder.repeat(last));
        recorder.repeated(last);
        let failed = recorder.begin(&Call::empty(Operation::Barrier));
        recorder.end(failed, Err::<(), _>(Error::Aborted { rank: 0 })).unwrap_err();
        let samples = samples_of("counted");
        let [all_reduces, barriers] = &samples[..] else { panic!("{samples:?}") };
        let numbers = |s: &Sample| (s.calls, s.failures, s.bytes, s.buckets.iter().sum::<u64>());
        assert_eq!((all_reduces.operation.as_str(), numbers(all_reduces)), ("all_reduce", (3, 0, 200, 2)));
        assert_eq!((barriers.operation.as_str(), numbers(barriers)), ("barrier", (1, 1, 0, 1)));
    }

    #[test]
    fn a_duration_is_in_a_bucket_that_holds_it() {
        let recorder = counting("timed");
        let id = recorder.begin(&all_reduce(1));
        std::thread::sleep(std::time::Duration::from_millis(3));
        recorder.end(id, Ok(())).unwrap();
        let sample = &samples_of("timed")[0];
        let bucket = sample.buckets.iter().position(|count| *count == 1).unwrap();
        assert!((0.002..60.0).contains(&sample.seconds), "{sample:?}");
        assert!(sample.seconds <= bound(bucket) * 1.1 && sample.seconds * 17.0 > bound(bucket), "{sample:?}");
    }

    #[test]
    fn the_counters_of_a_dropped_communicator_stay() {
        let recorder = counting("dropped");
        recorder.end(recorder.begin(&all_reduce(5)), Ok(())).unwrap();
        drop(recorder);
        assert_eq!(samples_of("dropped")[0].bytes, 20);
    }

    #[test]
    fn a_line_is_read_as_it_is_written() {
        let recorder = counting("a line \"of\" a\\job");
        recorder.end(recorder.begin(&all_reduce(5)), Ok(())).unwrap();
        let sample = samples_of("a line \"of\" a\\job").remove(0);
        assert_eq!(Sample::parse(&sample.to_line()).as_ref(), Some(&sample));
        for broken in ["", "a\tb", &format!("{}\tmore", sample.to_line())] {
            assert_eq!(Sample::parse(broken), None, "{broken}");
        }
        let text = render(&[sample]);
        let labels = r#"communicator="a line \"of\" a\\job",backend="host",rank="1",operation="all_reduce""#;
        assert!(text.contains(&format!("phalanx_bytes_total{{{labels}}} 20\n")), "{text}");
        assert!(
            text.contains(&format!("phalanx_operation_seconds_bucket{{{labels},le=\"+Inf\"}} 1\n")),
            "{text}"
        );
    }

    fn handed_over(snapshotter: &Snapshotter, name: &str) -> Vec<DebugValue> {
        let all = snapshotter.snapshot().into_vec().into_iter();
        let fits = all.filter(|(key, ..)| {
            let mut labels = key.key().labels();
            key.key().name() == name && labels.any(|label| label.value() == "handed over")
        });
        fits.map(|(_, _, _, value)| value).collect()
    }

    #[test]
    fn the_crate_metrics_gets_each_operation_once() {
        let recorder = counting("handed over");
        let facade = DebuggingRecorder::new();
        let snapshotter = facade.snapshotter();
        metrics::with_local_recorder(&facade, || {
            for round in 1..=2 {
                recorder.end(recorder.begin(&all_reduce(5)), Ok(())).unwrap();
                collect();
                let [DebugValue::Histogram(new)] =
                    &handed_over(&snapshotter, "phalanx_operation_seconds")[..]
                else {
                    panic!("one histogram")
                };
                assert_eq!(new.len(), 1, "in round {round}");
            }
            collect();
            let total = handed_over(&snapshotter, "phalanx_operations_total");
            assert!(matches!(total[..], [DebugValue::Counter(2)]), "{total:?}");
        });
    }

    /// What counting costs an operation; run with `--release -- --ignored --nocapture`.
    #[test]
    #[ignore = "a measurement"]
    fn cost_of_counting() {
        let call = all_reduce(2);
        let rounds = 2_000_000u32;
        let without = Recorder::new(BackendKind::Host, "without".into(), 0, 2);
        let with = counting("with");
        for _ in 0..5 {
            for (what, recorder) in [("without", &without), ("with", &with)] {
                let since = std::time::Instant::now();
                for _ in 0..rounds {
                    let id = recorder.begin(std::hint::black_box(&call));
                    let _ = std::hint::black_box(recorder.end(id, Ok(())));
                }
                println!(
                    "{what}: {:.1} ns an operation",
                    since.elapsed().as_nanos() as f64 / f64::from(rounds)
                );
            }
        }
    }
}
