//! Tests of `phalanx trace` as a program, on recorded files.

mod common;

use common::{phalanx, say};
use serde_json::Value;
use std::path::Path;

/// The summary of the records in `tests/trace/CASE`.
fn trace(case: &str) -> String {
    let said = say(phalanx(&format!("trace {}/tests/trace/{case}", env!("CARGO_MANIFEST_DIR"))));
    assert_eq!((said.code, said.stderr.as_str()), (Some(0), ""));
    said.stdout
}

#[test]
fn a_rank_that_did_not_come() {
    insta::assert_snapshot!(trace("timeout"));
}

#[test]
fn a_rank_that_called_something_else() {
    insta::assert_snapshot!(trace("mismatch"));
}

#[test]
fn a_rank_that_was_killed() {
    insta::assert_snapshot!(trace("died"));
}

#[test]
fn a_hang_without_an_error() {
    insta::assert_snapshot!(trace("hang"));
}

#[test]
fn messages_that_wait_for_each_other() {
    insta::assert_snapshot!(trace("messages"));
}

#[test]
fn a_rank_that_is_slower() {
    insta::assert_snapshot!(trace("slower"));
}

#[test]
fn hosts_with_clocks_of_their_own() {
    insta::assert_snapshot!(trace("hosts"));
}

/// The records of `slower`, each from a host of its own, whose clocks are minutes apart.
#[test]
fn a_rank_that_is_slower_on_another_host() {
    let folder = tempfile::tempdir().unwrap();
    for rank in 0..3u64 {
        let name = format!("job_x-rank{rank}-{}.json", 100 + rank);
        let text = std::fs::read(format!("{}/tests/trace/slower/{name}", env!("CARGO_MANIFEST_DIR")));
        let mut record: Value = serde_json::from_slice(&text.unwrap()).unwrap();
        record["boot"] = format!("boot-{rank}").into();
        let move_by = |time: &mut Value, by: u64| *time = (time.as_u64().unwrap() + by).into();
        let up = 1_000_000_000_000 * rank;
        move_by(&mut record["written_ns"], up);
        move_by(&mut record["written_unix_ns"], 200_000_000_000 * rank);
        for operation in record["records"].as_array_mut().unwrap() {
            for time in ["enqueued_ns", "started_ns", "ended_ns"] {
                move_by(&mut operation[time], up);
            }
        }
        std::fs::write(folder.path().join(name), record.to_string()).unwrap();
    }
    let said = say(phalanx(&format!("trace {}", folder.path().display()))).stdout;
    let verdict =
        "rank 1 came last to 20 of 20 operations, and the others waited 79.2 ms of 194.1 ms for it alone";
    assert!(said.contains("Rank 1: slower") && said.contains(verdict), "{said}");
}

#[test]
fn a_timeline_for_perfetto() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("timeline.json");
    let records = format!("{}/tests/trace/hang", env!("CARGO_MANIFEST_DIR"));
    assert_eq!(say(phalanx(&format!("trace {records} --perfetto {}", file.display()))).code, Some(0));
    let timeline: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let events = timeline["traceEvents"].as_array().unwrap();
    let bars: Vec<&Value> = events.iter().filter(|event| event["ph"] == "X").collect();
    assert_eq!(bars.len(), 7, "every operation");
    let open: Vec<&&Value> = bars.iter().filter(|bar| bar["name"] == "all_reduce (not over)").collect();
    assert_eq!(open.len(), 2);
    assert_eq!(open[0]["ts"], 1000.0);
    assert_eq!(open[0]["dur"], 30_000_000.0, "until the record was written");
    assert_eq!(open[0]["args"]["call"], "all_reduce(f32 × 1000, sum)");
    assert_eq!(events.iter().filter(|event| event["name"] == "process_name").count(), 3);
}

#[test]
fn a_picture() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("timeline.svg");
    let records = format!("{}/tests/trace/timeout", env!("CARGO_MANIFEST_DIR"));
    assert_eq!(say(phalanx(&format!("trace {records} --svg {}", file.display()))).code, Some(0));
    let picture = std::fs::read_to_string(file).unwrap();
    assert!(picture.starts_with("<svg") && picture.trim_end().ends_with("</svg>"));
    for text in ["rank 0", "rank 1", "rank 2", "all_reduce", "barrier", "job/x: 3 ranks"] {
        assert!(picture.contains(text), "{text} is in the picture");
    }
    // At least eleven operations, the background and a legend of five entries.
    assert!(picture.matches("<rect").count() >= 17);
}

/// The guilty rank's row is there even if it left no record, and is marked.
#[test]
fn a_picture_shows_the_rank_at_fault_and_why() {
    for (case, rank, verdict, why) in [
        ("died", "rank 1", "Rank 1: died", "its process ended"),
        ("timeout", "rank 1", "Rank 1: missing", "the others waited in all_reduce"),
        ("mismatch", "rank 3", "Rank 3: different call", "rank 3 called all_reduce"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("timeline.svg");
        let records = format!("{}/tests/trace/{case}", env!("CARGO_MANIFEST_DIR"));
        assert_eq!(say(phalanx(&format!("trace {records} --svg {}", file.display()))).code, Some(0));
        let picture = std::fs::read_to_string(file).unwrap();
        let texts: Vec<&str> =
            picture.split("<text").skip(1).filter_map(|text| Some(text.split_once("</text>")?.0)).collect();
        let label = texts.iter().find(|text| text.trim_end().ends_with(rank));
        let label = label.unwrap_or_else(|| panic!("{case}: there is no row of {rank}"));
        assert!(label.contains("#D55E00"), "{case}: the row is not marked: {label}");
        for text in [verdict, why] {
            assert!(texts.iter().any(|known| known.contains(text)), "{case}: {text} is missing in {texts:?}");
        }
    }
}

#[test]
fn a_minus_sign_is_standard_output_and_the_summary_gives_way() {
    let records = format!("{}/tests/trace/died", env!("CARGO_MANIFEST_DIR"));
    let said = say(phalanx(&format!("trace {records} --svg -")));
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    assert!(said.stdout.starts_with("<svg") && said.stdout.trim_end().ends_with("</svg>"), "{}", said.stdout);
    assert!(said.stderr.contains("Rank 1: died"), "{}", said.stderr);
}

#[test]
fn what_is_no_record_is_told() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a.json"), "{}").unwrap();
    let said = say(phalanx(&format!("trace {}", folder.path().display())));
    assert_eq!(said.code, Some(1));
    assert!(said.stderr.contains("a.json: not a flight record"), "{}", said.stderr);
    assert!(said.stderr.contains("PHALANX_TRACE_DIR"), "{}", said.stderr);
    let good = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/trace/hang/job_x-rank0-100.json");
    std::fs::copy(good, folder.path().join("b.json")).unwrap();
    let said = say(phalanx(&format!("trace {}", folder.path().display())));
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    assert!(said.stdout.contains("no record of ranks 1 and 2"), "{}", said.stdout);
    let said = say(phalanx(&format!("trace {}/a.json", folder.path().display())));
    assert_eq!(said.code, Some(1), "a file that was named must be one");
    let said = say(phalanx(&format!("trace {} --communicator y", folder.path().display())));
    assert!(said.stderr.contains("job/x"), "{}", said.stderr);
}

/// Records of 10,000 ranks on 1,250 hosts, of which one has not come to the last operation: read in time and in little memory,
/// and shown by hosts.
#[test]
fn ten_thousand_ranks_are_folded_by_host() {
    const RANKS: u64 = 10_000;
    const OPERATIONS: u64 = 20;
    let folder = tempfile::tempdir().unwrap();
    let name = "job_x-rank0-100.json";
    let text = std::fs::read(format!("{}/tests/trace/hang/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let mut record: Value = serde_json::from_slice(&text).unwrap();
    let operation = serde_json::json!({
        "operation": "all_reduce", "sequence": 1, "state": "completed", "dtype": "f32", "count": 10, "reduction": "sum",
        "enqueued_ns": 1000, "started_ns": 1000, "ended_ns": 2000
    });
    record["error"] = Value::Null;
    record["records"] = "OPERATIONS".into();
    let operation = |sequence: u64| {
        let mut operation = operation.clone();
        for (name, time) in [("enqueued_ns", 1000), ("started_ns", 1000), ("ended_ns", 2000)] {
            operation[name] = (time + 1_000_000 * sequence).into();
        }
        operation["sequence"] = sequence.into();
        if sequence == OPERATIONS {
            operation["state"] = "started".into();
            operation["ended_ns"] = 0.into();
        }
        operation
    };
    let [all, all_but_one] =
        [OPERATIONS, OPERATIONS - 1].map(|last| Value::from_iter((1..=last).map(operation)).to_string());
    for rank in 0..RANKS {
        let (last, operations) =
            if rank == 4321 { (OPERATIONS - 1, &all_but_one) } else { (OPERATIONS, &all) };
        let places = [("rank", rank), ("world_size", RANKS), ("made", last), ("written_ns", 1_000_000_000)];
        places.iter().for_each(|(name, value)| record[*name] = (*value).into());
        record["host"] = format!("h{}", rank / 8).into();
        let text = record.to_string().replace("\"OPERATIONS\"", operations);
        std::fs::write(folder.path().join(format!("job_x-rank{rank}-100.json")), text).unwrap();
    }
    let pictures = tempfile::tempdir().unwrap();
    let (svg, perfetto) = (pictures.path().join("picture.svg"), pictures.path().join("timeline.trace"));
    let (to_svg, to_perfetto) = (svg.display(), perfetto.display());
    let began = std::time::Instant::now();
    let said =
        say(phalanx(&format!("trace {} --svg {to_svg} --perfetto {to_perfetto}", folder.path().display())));
    let took = began.elapsed();
    #[cfg(target_os = "linux")]
    assert!(most_memory_of_a_child() < 500_000_000, "{} bytes", most_memory_of_a_child());
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    for part in [
        "10000 ranks",
        "Rank 4321: missing",
        "rank 4321 had completed all_reduce",
        "9999 ranks on 1250 hosts (h0, h1, h10, …): operations: 20, the last all_reduce(f32 × 10, sum) under way",
    ] {
        assert!(said.stdout.contains(part), "{part}: {}", said.stdout);
    }
    assert!(said.stdout.lines().count() < 60, "{}", said.stdout);
    let picture = std::fs::read_to_string(svg).unwrap();
    assert!(picture.contains("h0 ×8") && picture.contains("rank 4321") && picture.len() < 1 << 20);
    let timeline: Value = serde_json::from_slice(&std::fs::read(perfetto).unwrap()).unwrap();
    let events = timeline["traceEvents"].as_array().unwrap();
    let names =
        events.iter().filter(|event| event["name"] == "process_name").map(|event| &event["args"]["name"]);
    let names: Vec<&str> = names.map(|name| name.as_str().unwrap()).collect();
    assert_eq!(names.len(), 1250 + 1, "each host, and the rank at fault");
    for name in ["8 ranks on h0: rank 0", "7 ranks on h540: rank 4320", "rank 4321"] {
        assert!(names.contains(&name), "{name}");
    }
    assert!(took < std::time::Duration::from_secs(30), "{took:?}");
}

/// The most memory, in bytes, that one of the programs had which this test program has started so far.
#[cfg(target_os = "linux")]
fn most_memory_of_a_child() -> u64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: a pointer that is valid for the call, which writes a whole `rusage`; zeroes are one, too.
    let usage = unsafe {
        assert_eq!(libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr()), 0);
        usage.assume_init()
    };
    // Linux counts KiB.
    usage.ru_maxrss.cast_unsigned() * 1024
}

/// The data in a page.
fn data_of(page: &str) -> Value {
    let (_, data) = page.split_once("<script id=\"data\" type=\"application/json\">").unwrap();
    serde_json::from_str(data.split_once("</script>").unwrap().0).unwrap()
}

#[test]
fn a_page_for_a_browser_has_all_that_it_needs() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.html");
    let records = format!("{}/tests/trace/timeout", env!("CARGO_MANIFEST_DIR"));
    let said = say(phalanx(&format!("trace {records} --html {}", file.display())));
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    let page = std::fs::read_to_string(&file).unwrap();
    for outside in ["src=", "href=", "@import", "url(", "fetch("] {
        assert!(!page.contains(outside), "it needs nothing else: {outside}");
    }
    let data = data_of(&page);
    assert_eq!(data["summary"].as_str().unwrap(), said.stdout);
    let communicator = &data["communicators"][0];
    let verdict = communicator["findings"][0][0].as_str().unwrap();
    assert!(said.stdout.contains(verdict) && verdict.ends_with("missing"), "{verdict}");
    let rows = communicator["rows"].as_array().unwrap();
    assert_eq!(rows.len() as u64, communicator["ranks"].as_u64().unwrap());
    let at_fault: Vec<&str> =
        rows.iter().filter(|row| row["fault"] == true).map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(at_fault, [verdict.split(':').next().unwrap().to_lowercase()]);
    let bars: Vec<&Value> = rows.iter().flat_map(|row| row["bars"].as_array().unwrap()).collect();
    assert!(!bars.is_empty() && bars.iter().all(|bar| bar["end"].as_f64() >= bar["begin"].as_f64()));
}

#[test]
fn a_page_says_who_waited_for_whom() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.html");
    let records = format!("{}/tests/trace/slower", env!("CARGO_MANIFEST_DIR"));
    say(phalanx(&format!("trace {records} --html {}", file.display())));
    let data = data_of(&std::fs::read_to_string(&file).unwrap());
    let waits = data["communicators"][0]["waits"].as_array().unwrap();
    // As the summary says: rank 1 came last to 20 of 20, and the others waited 79.2 ms for it alone.
    assert_eq!((&waits[1]["rank"], &waits[1]["last"]), (&1.into(), &20.into()));
    assert!(
        (waits[1]["cost"].as_f64().unwrap() - 79.2).abs() < 0.1 && waits[1]["waited"] == 0.0,
        "{waits:?}"
    );
    assert!(waits[0]["waited"].as_f64() >= waits[1]["cost"].as_f64() && waits[0]["cost"] == 0.0, "{waits:?}");
}

/// A record's texts are a program's: they must not become part of the page.
#[test]
fn a_page_shows_hostile_names_as_text() {
    const NAME: &str = "</script><script>alert(1)</script>";
    let folder = tempfile::tempdir().unwrap();
    let records = format!("{}/tests/trace/timeout", env!("CARGO_MANIFEST_DIR"));
    for entry in std::fs::read_dir(records).unwrap().map(Result::unwrap) {
        let mut record: Value = serde_json::from_slice(&std::fs::read(entry.path()).unwrap()).unwrap();
        record["communicator"] = NAME.into();
        std::fs::write(folder.path().join(entry.file_name()), record.to_string()).unwrap();
    }
    let file = folder.path().join("trace.html");
    let said = say(phalanx(&format!("trace {} --html {}", folder.path().display(), file.display())));
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    let page = std::fs::read_to_string(&file).unwrap();
    assert!(!page.contains(NAME));
    assert_eq!(data_of(&page)["communicators"][0]["name"], NAME);
}

/// In a browser without a window: what its script writes, and what it draws.
#[test]
#[ignore = "needs chromium-headless-shell"]
fn a_browser_shows_the_page() {
    const BROWSER: &str = "chromium-headless-shell";
    let folder = tempfile::tempdir().unwrap();
    let [page, picture] = ["trace.html", "picture.png"].map(|name| folder.path().join(name));
    let records = format!("{}/tests/trace/slower", env!("CARGO_MANIFEST_DIR"));
    say(phalanx(&format!("trace {records} --html {}", page.display())));
    let browse = |option: &str| {
        let mut browser = std::process::Command::new(BROWSER);
        browser.args([
            "--no-sandbox",
            "--disable-gpu",
            "--window-size=1200,900",
            "--virtual-time-budget=2000",
            option,
        ]);
        let ended = browser.arg(format!("file://{}", page.display())).output().expect(BROWSER);
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        String::from_utf8(ended.stdout).unwrap()
    };
    let document = browse("--dump-dom");
    for text in [
        "<b>Rank 1: slower</b>",
        "<option value=\"0\">job/x</option>",
        "<td>20 times</td><td>79.2 ms</td>",
        "3 ranks, backend host",
    ] {
        assert!(document.contains(text), "{text} is missing in\n{document}");
    }
    browse(&format!("--screenshot={}", picture.display()));
    let mut decoder = png::Decoder::new(std::io::BufReader::new(std::fs::File::open(&picture).unwrap()));
    decoder.set_transformations(png::Transformations::ALPHA);
    let mut reader = decoder.read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    reader.next_frame(&mut pixels).unwrap();
    let of = |color: [u8; 3]| pixels.chunks_exact(4).filter(|pixel| pixel[..3] == color).count();
    // Two ranks with 20 bars each, which are some 20 × 20 pixels; and the name of the third in the colour of faults.
    assert!((8_000..40_000).contains(&of([0x00, 0x72, 0xb2])), "{} pixels of bars", of([0x00, 0x72, 0xb2]));
    assert!(of([0xd5, 0x5e, 0x00]) > 20, "{} pixels of faults", of([0xd5, 0x5e, 0x00]));
}
