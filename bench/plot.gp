# Chart of percent of the yardstick per shape, from the JSON lines of mha-bench, as SVG:
#
#     mha-bench --json bench.jsonl
#     gnuplot -e "input='bench.jsonl'; output='bench.svg'" bench/plot.gp
#     gnuplot -e "input='bench.jsonl'; output='decode.svg'; yardstick='read'" bench/plot.gp
#
# Shapes of several rows are bound by the product and compared with the bare sgemm; those of one row
# and those with a cache are bound by memory and compared with the plain read (yardstick='read').
# Bars per shape: composed and libmha, each at the first and at the last thread count of the run.
if (!exists("input")) input = 'bench.jsonl'
if (!exists("output")) output = 'bench.svg'
if (!exists("yardstick")) yardstick = 'sgemm'

# awk turns the lines into a table: shape, then composed and libmha at the first, then at the last
# thread count; ? where there is no such row. Only shapes bound by memory have a percent_read. Words
# of a JSON line alternate: key, value, key, value.
table = '< awk -v yardstick='.yardstick.' -F ''[{}":,]+'' ''\
/"record":"row"/ {\
  for (i = 2; i < NF; i += 2) line[$i] = $(i + 1);\
  if (line["engine"] != "composed" && line["engine"] != "libmha") next;\
  if (line["disturbed"] == "true" || line["type"] != "f32") next;\
  if ((line["percent_read"] == "null") != (yardstick == "sgemm")) next;\
  if (!(line["shape"] in known)) { known[line["shape"]] = 1; shapes[++n] = line["shape"] }\
  if (first == "") first = line["threads"];\
  last = line["threads"];\
  percent[line["shape"], line["engine"], last] = line["percent_" yardstick]\
}\
function cell(shape, engine, threads) {\
  return ((shape, engine, threads) in percent) ? percent[shape, engine, threads] : "?"\
}\
END {\
  printf "shape \"composed, threads: %d\" \"libmha, threads: %d\" ", first, first;\
  printf "\"composed, threads: %d\" \"libmha, threads: %d\"\n", last, last;\
  for (i = 1; i <= n; i++)\
    print shapes[i], cell(shapes[i], "composed", first), cell(shapes[i], "libmha", first),\
      cell(shapes[i], "composed", last), cell(shapes[i], "libmha", last)\
}'' '.input

set terminal svg size 900,420 font "sans-serif,13" background "white"
set output output
set datafile missing "?"
set style data histogram
set style histogram clustered gap 1
set style fill solid 1.0 border -1
set boxwidth 0.9
set yrange [0:100]
if (yardstick eq 'read') set yrange [0:110] # whoever loads in a better order may exceed 100
set ytics 20
set grid ytics lt 1 lc rgb "#cccccc"
set ylabel yardstick eq 'read' ? "percent of a plain read's speed" : "percent of a bare 1024³ sgemm"
set key outside top center horizontal noenhanced
set xtics nomirror noenhanced
if (yardstick eq 'read') set xtics rotate by 30 right
plot table using 2:xtic(1) title columnheader lc rgb "#d9d9d9", \
     '' using 3 title columnheader lc rgb "#6baed6", \
     '' using 4 title columnheader lc rgb "#969696", \
     '' using 5 title columnheader lc rgb "#08519c"
