# Chart of percent of bare sgemm per shape, from the JSON lines of mha-bench, as SVG:
#
#     mha-bench --json bench.jsonl
#     gnuplot -e "input='bench.jsonl'; output='bench.svg'" bench/plot.gp
#
# Bars per shape: composed and libmha, each at the first and at the last thread count of the run.
if (!exists("input")) input = 'bench.jsonl'
if (!exists("output")) output = 'bench.svg'

# awk turns the lines into a table: shape, then composed and libmha at the first, then at the last
# thread count; ? where there is no such row. One-row shapes are left out: memory bounds them, not
# the product. Words of a JSON line alternate: key, value, key, value.
table = '< awk -F ''[{}":,]+'' ''\
/"record":"row"/ {\
  for (i = 2; i < NF; i += 2) line[$i] = $(i + 1);\
  if (line["engine"] == "naive" || line["batch"] * line["seq"] == 1) next;\
  if (!(line["shape"] in known)) { known[line["shape"]] = 1; shapes[++n] = line["shape"] }\
  if (first == "") first = line["threads"];\
  last = line["threads"];\
  percent[line["shape"], line["engine"], last] = line["percent_sgemm"]\
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
set ytics 20
set grid ytics lt 1 lc rgb "#cccccc"
set ylabel "percent of a bare 1024³ sgemm"
set key outside top center horizontal noenhanced
set xtics nomirror noenhanced
plot table using 2:xtic(1) title columnheader lc rgb "#d9d9d9", \
     '' using 3 title columnheader lc rgb "#6baed6", \
     '' using 4 title columnheader lc rgb "#969696", \
     '' using 5 title columnheader lc rgb "#08519c"
